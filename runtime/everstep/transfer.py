"""The live training state, handed from a member to a newcomer over a group of two.

It is what a checkpoint holds, taken at the boundary at which both wait; nothing is written anywhere.
Small tensors travel together, large ones without a copy.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from everstep import group, state, store
from everstep.session import Capture

PACK_BYTES = 2**24
"""Tensors are packed into messages of this size; larger ones travel alone."""


def give(agent: store.Requests, epoch: int, key: str, applied: int, capture: Capture) -> None:
    """Raises `RuntimeError` or `TimeoutError` if the newcomer is lost."""
    pair = group.form_pair(agent, epoch=epoch, key=key, rank=0)
    flat = [(name, _to_bytes(tensor)) for name, tensor in capture.tensors.items()]
    head = {
        "applied": applied,
        "tree": capture.tree,
        "tensors": [
            [n, str(t.dtype).removeprefix("torch."), list(t.shape)]
            for n, t in capture.tensors.items()
        ],
    }
    raw = torch.frombuffer(bytearray(json.dumps(head).encode()), dtype=torch.uint8)
    pair.send(torch.tensor([len(raw)]))
    pair.send(raw)
    for message in _pack([len(raw) for _, raw in flat]):
        parts = [flat[i][1] for i in message]
        pair.send(parts[0] if len(parts) == 1 else torch.cat(parts))


def take(agent: store.Requests, epoch: int, key: str) -> tuple[int, dict[str, Any], state.Tensors]:
    """The step, the state tree and the tensors (on the CPU). Raises as `give`."""
    pair = group.form_pair(agent, epoch=epoch, key=key, rank=1)
    length = torch.zeros(1, dtype=torch.int64)
    pair.receive(length)
    raw = torch.empty(int(length), dtype=torch.uint8)
    pair.receive(raw)
    head = json.loads(raw.numpy().tobytes())
    described = [(n, getattr(torch, d), tuple(s)) for n, d, s in head["tensors"]]
    sizes = [torch.Size(shape).numel() * dtype.itemsize for _, dtype, shape in described]
    tensors: state.Tensors = {}
    for message in _pack(sizes):
        received = torch.empty(sum(sizes[i] for i in message), dtype=torch.uint8)
        pair.receive(received)
        for i, part in zip(
            message, torch.split(received, [sizes[i] for i in message]), strict=True
        ):
            name, dtype, shape = described[i]
            # A clone begins where its dtype may begin; a part of a message need not.
            tensors[name] = part.clone().view(dtype).view(shape)
    return int(head["applied"]), head["tree"], tensors


def _to_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _pack(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Indices of the tensors in each message; those without bytes stay in one, too."""
    message: list[int] = []
    filled = 0
    for index, size in enumerate(sizes):
        if message and filled + size > PACK_BYTES:
            yield message
            message, filled = [], 0
        message.append(index)
        filled += size
    if message and filled:
        yield message

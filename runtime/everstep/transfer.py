"""The live training state, handed from a member to a newcomer over a group of two.

It is what a checkpoint holds, taken at the boundary at which both wait; nothing is written anywhere.
Small tensors travel together, large ones alone and without a copy.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from everstep import forming, state, store
from everstep.snapshot import Capture

PACK_BYTES = 2**24
"""Tensors are packed into messages of this size; larger ones travel alone."""


def give(agent: store.Requests, epoch: int, key: str, applied: int, capture: Capture) -> None:
    """Raises `RuntimeError` or `TimeoutError` if the newcomer is lost."""
    pair = forming.form_pair(agent, epoch=epoch, key=key, rank=0)
    flat = [_to_bytes(tensor) for tensor in capture.tensors.values()]
    head = {
        "applied": applied,
        "tree": capture.tree,
        "tensors": [
            [n, state.dtype_name(t.dtype), list(t.shape)] for n, t in capture.tensors.items()
        ],
    }
    raw = torch.frombuffer(bytearray(json.dumps(head).encode()), dtype=torch.uint8)
    pair.send(torch.tensor([len(raw)]))
    pair.send(raw)
    for message in _pack([len(part) for part in flat]):
        parts = [flat[i] for i in message]
        pair.send(parts[0] if len(parts) == 1 else torch.cat(parts))


def take(agent: store.Requests, epoch: int, key: str) -> tuple[int, dict[str, Any], state.Tensors]:
    """The step, the state tree and the tensors (on the CPU). Raises as `give`."""
    pair = forming.form_pair(agent, epoch=epoch, key=key, rank=1)
    length = torch.zeros(1, dtype=torch.int64)
    pair.receive(length)
    raw = torch.empty(int(length), dtype=torch.uint8)
    pair.receive(raw)
    head = json.loads(raw.numpy().tobytes())
    tensors = {n: torch.empty(s, dtype=getattr(torch, d)) for n, d, s in head["tensors"]}
    flat = [_to_bytes(t) for t in tensors.values()]
    for message in _pack([len(part) for part in flat]):
        parts = [flat[i] for i in message]
        if len(parts) == 1:
            pair.receive(parts[0])
            continue
        received = torch.empty(sum(map(len, parts)), dtype=torch.uint8)
        pair.receive(received)
        for part, sent in zip(parts, torch.split(received, [len(p) for p in parts]), strict=True):
            part.copy_(sent)
    return int(head["applied"]), head["tree"], tensors


def _to_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A view of its memory, if that is contiguous and on the CPU; else of a copy."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _pack(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Indices of the tensors in each message. Those without bytes need not travel."""
    message: list[int] = []
    filled = 0
    for index, size in enumerate(sizes):
        if not size:
            continue
        if message and filled + size > PACK_BYTES:
            yield message
            message, filled = [], 0
        message.append(index)
        filled += size
    if message:
        yield message

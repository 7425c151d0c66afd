"""Hands the live training state from a member to a newcomer over a group of two.

The state is what a checkpoint holds, as of the boundary at which the newcomer joins; nothing is
written anywhere. Of a tensor that the unit's ranks divide, the giver sends its local tensor: the
newcomer has the same place in another unit. What the newcomer already holds is not sent. Small
tensors are sent together, large ones alone, in pieces and without a copy. Each piece that arrives
shows that the transfer makes progress. The giver computes meanwhile, so at the end it reports
whether the state stayed as it was.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from everstep import device, forming, held_already, state, store
from everstep.errors import StateError
from everstep.sharded import is_sharded, local_of
from everstep.snapshot import Capture
from everstep.staging import NOTHING

NO_DIGESTS: Mapping[str, str] = MappingProxyType({})
PIECE_BYTES = 2**24
"""No message is larger."""
PACK_BYTES = 2**20
"""Tensors are packed into messages of this size; larger ones are sent alone. Packing costs a copy
on each side: with 16 MiB, tensors of 4 MiB took three times as long (256 MiB, one machine).
"""
_ABOUT = "newcomer"
"""Key under which a newcomer reports what it holds. A newcomer of an older version does not, and
receives each tensor in one piece.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """The state of another rank, as of step `applied`."""

    applied: int
    tree: dict[str, Any]
    tensors: state.Tensors
    """Those of the newcomer's own that fit, where they are; all others on the CPU."""
    parts: frozenset[str]
    """Tensors that the ranks of a unit divide; `tensors` holds one rank's local tensors of them."""


def give(
    agent: store.Requests,
    epoch: int,
    key: str,
    applied: int,
    capture: Capture,
    find_changed: Callable[[], str] = lambda: "",
) -> str:
    """Send the state to the newcomer. Return the name of a tensor that has changed meanwhile, as
    `find_changed` reports it; then the newcomer does not use what it received. Raises
    `RuntimeError` or `TimeoutError` if the newcomer is lost.
    """
    pair = forming.form_pair(agent, epoch=epoch, key=key, rank=0)
    keys = store.AgentStore(agent, epoch, f"{key}/")
    told = json.loads(keys.get(_ABOUT)) if keys.check([_ABOUT]) else None
    held = {name: local_of(t) for name, t in capture.tensors.items()}
    same = held_already.find(held, told["has"]) if told else set()
    sent = [t.detach() for n, t in held.items() if n not in same]
    head = {
        "applied": applied,
        "tree": capture.tree,
        "tensors": [[n, state.dtype_name(t.dtype), list(t.shape)] for n, t in held.items()],
        "verdict": True,
        "piece": PIECE_BYTES,
        "same": sorted(same),
        "parts": [name for name, t in capture.tensors.items() if is_sharded(t)],
    }
    raw = torch.frombuffer(bytearray(json.dumps(head).encode()), dtype=torch.uint8)
    pair.send(torch.tensor([len(raw)], device="cpu"))
    pair.send(raw)
    for message in _pack([t.nbytes for t in sent]):
        for piece in _read([sent[i] for i in message], PIECE_BYTES if told else 0):
            pair.send(piece)
    changed = find_changed()
    pair.send(torch.tensor([1 if changed else 0], device="cpu"))
    return changed


def take(
    agent: store.Requests,
    epoch: int,
    key: str,
    own: Mapping[str, torch.Tensor] = NOTHING,
    has: Mapping[str, str] = NO_DIGESTS,
    tell: Callable[[int, int], None] = lambda received, expected: None,
) -> Taken:
    """Receive the giver's state. Raises like `give`, and `StateError` if the state changed while it was sent.

    Args:
        own: the newcomer's tensors by name. What fits is received into them: this is memory that
            the newcomer has touched before, and no further copy is needed.
        has: digests of some of these (`held_already.py`): what is the same on the giver is not
            sent.
        tell: called with the number of bytes that have arrived, and of all that will.
    """
    store.AgentStore(agent, epoch, f"{key}/").set(_ABOUT, json.dumps({"has": {**has}}))
    pair = forming.form_pair(agent, epoch=epoch, key=key, rank=1)
    length = torch.zeros(1, dtype=torch.int64, device="cpu")
    pair.receive(length)
    raw = torch.empty(int(length), dtype=torch.uint8, device="cpu")
    pair.receive(raw)
    head = json.loads(raw.numpy().tobytes())
    same = {n: own[n].detach() for n in head.get("same", ())}
    tensors = _take_room(head["tensors"], own, same)
    flat = [device.bytes_of(t) for n, t in tensors.items() if n not in same]
    received, expected = 0, sum(map(len, flat))
    for message in _pack([len(part) for part in flat]):
        parts = [flat[i] for i in message]
        size = sum(map(len, parts))
        whole = parts[0] if len(parts) == 1 else torch.empty(size, dtype=torch.uint8, device="cpu")
        for piece in torch.split(whole, head.get("piece", size)):
            with device.writing(piece) as room:
                pair.receive(room)
            received += len(piece)
            tell(received, expected)
        if len(parts) > 1:
            sent = torch.split(whole, [len(p) for p in parts])
            for part, filled in zip(parts, sent, strict=True):
                part.copy_(filled)
    if head.get("verdict"):  # an older giver waits at the boundary, and sends no verdict
        changed = torch.zeros(1, dtype=torch.int64, device="cpu")
        pair.receive(changed)
        if int(changed):
            raise StateError("the state changed while it was handed over")
    divided = frozenset(head.get("parts", ()))  # an older giver sends none, and has none
    return Taken(applied=int(head["applied"]), tree=head["tree"], tensors=tensors, parts=divided)


def _take_room(
    described: Sequence[tuple[str, str, list[int]]],
    own: Mapping[str, torch.Tensor],
    same: Mapping[str, torch.Tensor],
) -> state.Tensors:
    used = {t.data_ptr() for t in same.values()}
    found: state.Tensors = {}
    for name, dtype, shape in described:
        mine = own.get(name)
        if name in same:
            found[name] = same[name]
        elif mine is not None and _fits(mine, dtype, shape) and mine.data_ptr() not in used:
            used.add(mine.data_ptr())
            found[name] = mine.detach()
        else:
            found[name] = torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
    return found


def _fits(tensor: torch.Tensor, dtype: str, shape: Sequence[int]) -> bool:
    same = state.dtype_name(tensor.dtype) == dtype and list(tensor.shape) == list(shape)
    return same and tensor.is_contiguous()


def _read(tensors: Sequence[torch.Tensor], piece_bytes: int) -> Iterator[torch.Tensor]:
    """The bytes of one message, in pieces; 0 bytes: in one. A large tensor on the device is never in the host's memory
    as a whole.
    """
    if len(tensors) == 1:
        yield from device.read(tensors[0], piece_bytes or tensors[0].nbytes)
    else:
        yield torch.cat([piece.clone() for t in tensors for piece in device.read(t)])


def _pack(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Indices of the tensors in each message. Tensors without bytes are not sent."""
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

"""The persistent buffers that forward may change (BatchNorm's statistics), as bits.

Each micro-batch begins with the buffers as they were when the loop began, and all ranks end the
loop with the buffers that micro-batch 0 left. So the buffers do not depend on how many ranks share
the micro-batches. They travel as bits, four bytes in each number of the vector: adding zeros
changes none of them, whatever their dtype.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import torch

from everstep import device
from everstep.errors import Misuse
from everstep.sharded import is_whole, local_of, version_of
from everstep.tracked import Tracked
from everstep.vector import Numbers

SMALL_BYTES = 2**20
TOTAL_BYTES = 2**24
_WORD = 4
"""Bytes in a number of the vector: a float64 holds every whole number below 2**53 exactly."""


Mark = tuple[int, int]
"""Which tensor a buffer is, and its version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferRef:
    """A buffer by owner and name, because forward may change it in place or put another tensor there."""

    name: str
    owner: torch.nn.Module
    key: str
    places: list[tuple[str, str]] = field(default_factory=list, compare=False)
    """Every (tracked module, key in its state_dict) under which it is stored."""

    @property
    def tensor(self) -> torch.Tensor:
        buffer = self.owner._buffers[self.key]
        assert buffer is not None, self.name
        return buffer


@dataclass(frozen=True, slots=True)
class Held:
    """A copy of the small buffers."""

    tensors: list[torch.Tensor]
    """The tensors that were the buffers."""
    bits: list[torch.Tensor]
    """For each device a uint8 tensor [bytes]: the copies, one after the other."""


class Buffers:
    """The persistent buffers of the tracked modules. The small ones are grouped by device, in one
    fixed order. A buffer that is divided among ranks counts as large, because no rank holds all of
    what micro-batch 0 left of it.
    """

    def __init__(self, tracked: Tracked) -> None:
        self.small: list[BufferRef] = []
        self.large: list[BufferRef] = []
        room = TOTAL_BYTES
        for ref in _list_buffers(tracked):
            size = _size(ref.tensor)
            if size <= min(SMALL_BYTES, room) and is_whole(ref.tensor):
                room -= size
                self.small.append(ref)
            else:
                self.large.append(ref)
        self.small.sort(key=lambda ref: str(ref.tensor.device))
        self._sizes = [_size(ref.tensor) for ref in self.small]
        self._known = {f"{name}.{place}" for name, place, *_ in _walk(tracked)}

    def require_known(self, tracked: Tracked) -> None:
        """Raises `Misuse` if a tracked module holds a buffer that it did not have when they were listed,
        unless it can load one.
        """
        for name, place, owner, _ in _walk(tracked):
            if f"{name}.{place}" not in self._known and _loads_as_torch(owner):
                raise Misuse(
                    f"forward gave a tracked module the buffer {name}.{place}. A checkpoint would hold it, and a rank "
                    "that restarts or joins could not load it, because the script makes the module without it. "
                    "Register it in __init__ with its final shape, or with persistent=False if a checkpoint need not "
                    "hold it"
                )

    def list_small(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """(tracked module, key in its state_dict, tensor) of the small buffers."""
        return _list_places(self.small)

    def list_large(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """The same for the large buffers."""
        return _list_places(self.large)

    @property
    def numbers(self) -> int:
        """Number of elements that the small buffers occupy in the vector."""
        return -(-sum(self._sizes) // _WORD)

    def hold(self) -> Held:
        """Copy the small buffers, on their devices."""
        tensors = [ref.tensor for ref in self.small]
        bits = [
            torch.cat([device.bytes_of(local_of(tensor)) for tensor in own])
            for own in self._by_device(tensors)
        ]
        return Held(tensors, bits)

    def put_back(self, held: Held) -> None:
        """Restore the buffers as they were when `held` was taken: the same tensors, with the same values."""
        for ref, tensor in zip(self.small, held.tensors, strict=True):
            ref.owner._buffers[ref.key] = tensor
        self._set(held.bits)

    def mark_large(self) -> list[Mark]:
        """Mark the large buffers as they are now."""
        return [_mark(ref.tensor) for ref in self.large]

    def find_changed_large(self, marks: Sequence[Mark]) -> str:
        """Name and size of a large buffer that was changed or replaced since; empty: none was."""
        for ref, mark in zip(self.large, marks, strict=True):
            if _mark(ref.tensor) != mark:
                return f"{ref.name} ({_size(ref.tensor) / 2**20:.1f} MiB)"
        return ""

    def find_changed(self, held: Held) -> str:
        """Name of a buffer that holds other bits than when `held` was taken; empty: none does."""
        now = self.hold()
        if all(map(torch.equal, now.bits, held.bits)):
            return ""
        pairs = zip(self.small, self._split(now), self._split(held), strict=True)
        return next((ref.name for ref, new, old in pairs if not torch.equal(new, old)), "")

    def _split(self, held: Held) -> list[torch.Tensor]:
        """The bits of each buffer."""
        groups = zip(self._by_device(held.tensors), held.bits, strict=True)
        return [part for own, bits in groups for part in torch.split(bits, list(map(_size, own)))]

    def pack(self, held: Held) -> Numbers:
        """Pack the copy for the vector, [numbers]. One transfer from each device. Raises `Misuse` if
        forward has changed the size of a buffer.
        """
        if not self.small:
            return np.zeros(0)
        for ref, tensor, size in zip(self.small, held.tensors, self._sizes, strict=True):
            if _size(tensor) != size:
                raise Misuse(
                    f"forward changes the size of the buffer {ref.name}, now {tuple(tensor.shape)}; a buffer that a "
                    "checkpoint holds keeps its size. Register it with persistent=False if none need hold it"
                )
        raw = np.zeros(self.numbers * _WORD, np.uint8)
        if held.bits:
            raw[: sum(self._sizes)] = torch.cat([own.cpu() for own in held.bits]).numpy()
        return raw.view(np.uint32).astype(np.float64)

    def take(self, numbers: Numbers) -> None:
        """Set the buffers from what a rank packed. One transfer to each device."""
        if not self.small:
            return
        raw = torch.from_numpy(numbers.astype(np.uint32).view(np.uint8))[: sum(self._sizes)]
        groups = self._by_device([ref.tensor for ref in self.small])
        parts = torch.split(raw, [sum(map(_size, own)) for own in groups]) if groups else ()
        self._set([part.to(own[0].device) for part, own in zip(parts, groups, strict=True)])

    def _set(self, bits: Sequence[torch.Tensor]) -> None:
        targets = [local_of(ref.tensor) for ref in self.small]
        with torch.no_grad():
            for own, joined in zip(self._by_device(targets), bits, strict=True):
                parts = torch.split(joined, [_size(tensor) for tensor in own])
                for tensor, part in zip(own, parts, strict=True):
                    # A clone is aligned for its dtype; a part of `joined` may not be.
                    tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))

    def _by_device(self, tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """One list for each device; the small buffers are sorted by device."""
        return [list(own) for _, own in groupby(tensors, key=lambda tensor: str(tensor.device))]


def _list_places(refs: Sequence[BufferRef]) -> Iterator[tuple[str, str, torch.Tensor]]:
    for ref in refs:
        tensor = ref.tensor
        yield from ((owner, key, tensor) for owner, key in ref.places)


def _mark(tensor: torch.Tensor) -> Mark:
    return id(tensor), -1 if tensor.is_inference() else version_of(tensor)


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _list_buffers(tracked: Tracked) -> list[BufferRef]:
    found: dict[int, BufferRef] = {}
    for name, place, owner, key in _walk(tracked):
        new = BufferRef(name=f"{name}.{place}", owner=owner, key=key)
        if not torch.nn.parameter.is_lazy(new.tensor):
            found.setdefault(id(new.tensor), new).places.append((name, place))
    return list(found.values())


def _walk(tracked: Tracked) -> Iterator[tuple[str, str, torch.nn.Module, str]]:
    """(tracked module, key in its state_dict, owner, the owner's key) of each persistent buffer."""
    for name, module in tracked.of_kind("module"):
        for path, owner in module.named_modules(remove_duplicate=False):
            for key, buffer in owner._buffers.items():
                if buffer is not None and key not in owner._non_persistent_buffers_set:
                    yield name, ".".join(part for part in (path, key) if part), owner, key


def _loads_as_torch(owner: torch.nn.Module) -> bool:
    """Whether the module loads only what it has."""
    plain = type(owner)._load_from_state_dict is torch.nn.Module._load_from_state_dict
    return plain and not owner._load_state_dict_pre_hooks

"""What a step's beginning looked like, so that a step that cannot end leaves the state as it was
before it.

Until its first reduction is applied a step changes only two things that a checkpoint holds: the
random states, and the buffers that forward changes (BatchNorm). Both are copied when the step
begins. Buffers above a limit are not copied, so forward must not change them; that is checked, and
refused by name.
"""

from dataclasses import dataclass
from typing import Any

import torch

from everstep import randomness
from everstep.errors import Misuse
from everstep.tracked import Tracked

SMALL_BYTES = 2**20
TOTAL_BYTES = 2**24


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Where a buffer hangs; forward may change it in place or put another tensor there."""

    name: str
    owner: torch.nn.Module
    key: str

    @property
    def tensor(self) -> torch.Tensor:
        buffer = self.owner._buffers[self.key]
        assert buffer is not None, self.name
        return buffer


class Buffers:
    """The persistent buffers of the tracked modules, small ones first in one fixed order."""

    def __init__(self, tracked: Tracked) -> None:
        self.small: list[Slot] = []
        self.large: list[Slot] = []
        room = TOTAL_BYTES
        for slot in _slots(tracked):
            size = slot.tensor.numel() * slot.tensor.element_size()
            if size <= min(SMALL_BYTES, room) and not slot.tensor.is_complex():
                room -= size
                self.small.append(slot)
            else:
                self.large.append(slot)

    @property
    def elements(self) -> int:
        return sum(slot.tensor.numel() for slot in self.small)

    def numbers(self) -> torch.Tensor:
        """All small buffers as one float64 vector on the CPU (exact for float32 and for integers
        below 2**53).
        """
        parts = [slot.tensor.detach().reshape(-1).to("cpu", torch.float64) for slot in self.small]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.float64)

    def take(self, numbers: torch.Tensor) -> None:
        """Set the small buffers from such a vector: every rank then has those of rank 0."""
        parts = (
            torch.split(numbers, [slot.tensor.numel() for slot in self.small]) if self.small else ()
        )
        with torch.no_grad():
            for slot, part in zip(self.small, parts, strict=True):
                slot.tensor.copy_(part.view(slot.tensor.shape))


class StepStart:
    """Taken when a step begins."""

    def __init__(self, tracked: Tracked, buffers: Buffers) -> None:
        self._tracked, self._buffers = tracked, buffers
        self._random = randomness.capture()
        self._small = [(slot.tensor, slot.tensor.detach().clone()) for slot in buffers.small]
        self._large = [(id(slot.tensor), slot.tensor._version) for slot in buffers.large]
        self._mark = fingerprint(tracked)

    def untouched(self) -> bool:
        """Whether no parameter and no schedule has changed since."""
        return fingerprint(self._tracked) == self._mark

    def put_back(self) -> None:
        for slot, (tensor, before) in zip(self._buffers.small, self._small, strict=True):
            slot.owner._buffers[slot.key] = tensor
            with torch.no_grad():
                tensor.copy_(before)
        randomness.restore(self._random)

    def check_large(self) -> None:
        """Raises `Misuse` if forward changed a buffer that is too large to be put back."""
        for slot, mark in zip(self._buffers.large, self._large, strict=True):
            if (id(slot.tensor), slot.tensor._version) != mark:
                size = slot.tensor.numel() * slot.tensor.element_size()
                raise Misuse(
                    f"forward changes the buffer {slot.name} ({size / 2**20:.1f} MiB); buffers "
                    "that change may have "
                    f"at most {SMALL_BYTES >> 20} MiB each and {TOTAL_BYTES >> 20} MiB together. "
                    "Register it with "
                    "persistent=False if a checkpoint need not hold it"
                )


def fingerprint(tracked: Tracked) -> tuple[Any, ...]:
    """Changes whenever a tracked parameter or the count of a schedule does."""
    versions = [p._version for p in tracked.named_parameters().values()]
    counts = [getattr(thing, "last_epoch", None) for _, thing in tracked.objects.values()]
    return (sum(versions), *counts)


def _slots(tracked: Tracked) -> list[Slot]:
    found: dict[int, Slot] = {}
    for name, module in tracked.of_kind("module"):
        for path, owner in module.named_modules():
            for key, buffer in owner._buffers.items():
                if buffer is not None and key not in owner._non_persistent_buffers_set:
                    full = ".".join(part for part in (name, path, key) if part)
                    found.setdefault(id(buffer), Slot(name=full, owner=owner, key=key))
    return list(found.values())

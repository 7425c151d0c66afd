"""The state at the beginning of a step, so that a step that cannot end leaves no trace.

Until its first reduction is applied, a step changes two things that a checkpoint holds: the random
states, and the buffers that forward changes (BatchNorm). Both are copied when the step begins.
Buffers above a limit are not copied, so forward must not change them; that is checked.
"""

from typing import Any

from everstep import randomness
from everstep.buffers import SMALL_BYTES, TOTAL_BYTES, Buffers
from everstep.errors import Misuse
from everstep.tracked import Tracked


class StepStart:
    """A copy of what a step may change before its first reduction is applied."""

    def __init__(self, tracked: Tracked, buffers: Buffers) -> None:
        self._tracked, self._buffers = tracked, buffers
        self._random = randomness.capture()
        self._small = buffers.hold()
        self._large = [(id(ref.tensor), ref.tensor._version) for ref in buffers.large]
        self._mark = fingerprint(tracked)

    def untouched(self) -> bool:
        """Whether no parameter and no schedule has changed since."""
        return fingerprint(self._tracked) == self._mark

    def put_back(self) -> None:
        self._buffers.put_back(self._small)
        randomness.restore(self._random)

    def check_large(self) -> None:
        """Raises `Misuse` if forward changed a buffer that is too large to be put back."""
        for ref, mark in zip(self._buffers.large, self._large, strict=True):
            if (id(ref.tensor), ref.tensor._version) != mark:
                size = ref.tensor.numel() * ref.tensor.element_size()
                raise Misuse(
                    f"forward changes the buffer {ref.name} ({size / 2**20:.1f} MiB); buffers "
                    f"that change may have at most {SMALL_BYTES >> 20} MiB each and "
                    f"{TOTAL_BYTES >> 20} MiB together. Register it with persistent=False if a "
                    "checkpoint need not hold it"
                )


def fingerprint(tracked: Tracked) -> tuple[Any, ...]:
    """A value that changes when a tracked parameter or the count of a schedule does."""
    versions = [p._version for p in tracked.named_parameters().values()]
    counts = [getattr(thing, "last_epoch", None) for _, thing in tracked.objects.values()]
    return (sum(versions), *counts)

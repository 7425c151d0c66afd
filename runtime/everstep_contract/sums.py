"""How many sums of a reduction a rank has launched and completed: its buckets in order, then the
vector.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    step: int
    reduction: int
    """Number of the loop within the step, as in the ledger."""
    buckets: int
    joined: int
    """How many of the buckets and the vector this rank has launched."""
    complete: int
    """How many of the buckets are complete on this rank."""

    @property
    def place(self) -> tuple[int, int, int]:
        """The sum in which this rank waits, or will wait next. Sums complete in order."""
        return self.step, self.reduction, self.complete

    def describe_wait(self) -> str:
        """The sum in which this rank waits."""
        return self._name(self.complete)

    def describe_next(self) -> str:
        """The first sum that this rank has not launched; empty: it has launched all."""
        return self._name(self.joined) if self.joined <= self.buckets else ""

    def _name(self, before: int) -> str:
        sum = f"bucket {before + 1} of {self.buckets}" if before < self.buckets else "the vector"
        return f"{sum} in reduction {self.reduction} of step {self.step}"

    def has_joined(self, other: "Sums") -> bool:
        """Whether this rank has launched the sum in which `other` waits."""
        same = (self.step, self.reduction) == (other.step, other.reduction)
        return same and self.joined > other.complete


def find_first(waiting: Iterable[Sums]) -> Sums | None:
    """The sums of the rank that is furthest behind: no rank can complete a later sum before the one
    in which that rank waits.
    """
    return min(waiting, key=lambda s: s.place, default=None)


def describe_missed(own: Sums | None, others: Iterable[Sums]) -> str:
    """Which sum a rank holds up; empty: the others wait in none.

    Args:
        own: sums of that rank; None: it is in no reduction.
        others: sums of the ranks that wait.
    """
    first = find_first(others)
    if first is None:
        return ""
    if own is not None and own.has_joined(first):
        return (
            f"the others wait in {first.describe_wait()}, which it has launched and not completed"
        )
    return f"it missed {first.describe_wait()}, in which the others wait"

"""How far a rank is with the sums of a reduction: its buckets in their order, and the vector behind them."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    step: int
    reduction: int
    """Number of the step's loop, as in the ledger."""
    buckets: int
    joined: int
    """So many of the buckets and the vector were launched on this rank."""
    complete: int
    """So many of the buckets are complete on this rank."""

    @property
    def place(self) -> tuple[int, int, int]:
        """The sum in which this rank waits, or will wait next. Sums complete in their order."""
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
    """Where the rank waits that is least far: no rank can complete a later sum before that one."""
    return min(waiting, key=lambda s: s.place, default=None)


def describe_missed(own: Sums | None, others: Iterable[Sums]) -> str:
    """Which sum a rank holds up; empty: the others wait in none.

    Args:
        own: of that rank; None: it is in no reduction.
        others: of those that wait.
    """
    first = find_first(others)
    if first is None:
        return ""
    if own is not None and own.has_joined(first):
        return (
            f"the others wait in {first.describe_wait()}, which it has launched and not completed"
        )
    return f"it missed {first.describe_wait()}, in which the others wait"

"""Whether a run that is interrupted repeatedly still makes progress. Pure.

External interruptions may occur any number of times, as long as the run takes new steps between
them. Interruptions without a new step have a cause that no restart fixes.
"""

from dataclasses import dataclass, replace

WINDOW_SECONDS = 86_400.0
"""Older interruptions do not count, as in the operator's restart budgets."""


@dataclass(frozen=True, slots=True)
class Interruptions:
    """The interruptions since the run's furthest step, `step`."""

    step: int = 0
    times: tuple[float, ...] = ()

    def reach(self, step: int) -> "Interruptions":
        """Forget the interruptions if `step` is a new one. Repeating an earlier step is no
        progress.
        """
        return Interruptions(step=step) if step > self.step else self

    def add(self, now: float, count: int = 1) -> "Interruptions":
        recent = tuple(t for t in self.times if now - t < WINDOW_SECONDS)
        return replace(self, times=(*recent, *(now for _ in range(count))))

    @property
    def count(self) -> int:
        return len(self.times)

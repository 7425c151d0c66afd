"""The remaining time of a first build. Pure.

Each module has a reference time: with cold caches, on two idle cores. Progress is counted in compiled
packages. The pace of this machine (its time so far, divided by the reference time of that work) scales
the remaining work. Packages in Go's cache are not counted, so a warm build is quicker than the estimate.
"""

from dataclasses import dataclass, replace

PRIOR_SECONDS = 30.0
"""Seconds of work at reference pace that are added to the measurement, so that one early figure decides little."""
COMPILING = 0.85
"""Share of a module's time spent on compiling packages; the rest is linking. Assumed, not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remaining:
    """All in seconds; `work` is the reference time: on two idle cores."""

    work: float
    done: float = 0.0
    """Work of the modules built so far."""
    took: float = 0.0
    """Their build time here."""

    def after(self, work: float, took: float) -> "Remaining":
        return replace(self, done=self.done + work, took=self.took + took)

    def left(self, work: float, share: float, elapsed: float) -> float:
        """Seconds left when `share` (0 to 1) of a module of `work` took `elapsed` here."""
        done = self.done + share * work
        pace = (self.took + elapsed + PRIOR_SECONDS) / (done + PRIOR_SECONDS)
        return max(0.0, self.work - done) * pace


def share_compiled(count: int, total: int) -> float:
    return COMPILING * min(count, total) / total if total else 0.0


def shown(seconds: float) -> str:
    """For example `about 4 min left`."""
    minutes = round(seconds / 60)
    return f"about {minutes} min left" if minutes else "less than a minute left"

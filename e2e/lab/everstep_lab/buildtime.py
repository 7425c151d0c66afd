"""Estimates the remaining time of a first build. Pure.

Each module has a reference time: its build time with empty caches, on two idle cores. Progress is
counted in compiled packages. The pace of this machine is its time so far, divided by the reference
time of the work done. The estimate is the remaining reference time, multiplied by the pace.
Packages in Go's cache are not counted, so a build with a filled cache is quicker than the estimate.
"""

from dataclasses import dataclass, replace

PRIOR_SECONDS = 30.0
"""Seconds at the reference pace, added to the measurement so that its first values count little."""
COMPILING = 0.85
"""Share of a build's time that compiling takes; linking takes the rest. Assumed, not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remaining:
    """All fields are in seconds. `work` is the reference time of all modules to build."""

    work: float
    done: float = 0.0
    """Reference time of the modules built so far."""
    took: float = 0.0
    """Build time of these modules on this machine."""

    def after(self, work: float, took: float) -> "Remaining":
        return replace(self, done=self.done + work, took=self.took + took)

    def left(self, work: float, share: float, elapsed: float) -> float:
        """The seconds left for all modules.

        `share` (0 to 1) of the current module is done; that took `elapsed` seconds on this machine.
        `work` is the reference time of the current module.
        """
        done = self.done + share * work
        pace = (self.took + elapsed + PRIOR_SECONDS) / (done + PRIOR_SECONDS)
        return max(0.0, self.work - done) * pace


def share_compiled(count: int, total: int) -> float:
    return COMPILING * min(count, total) / total if total else 0.0


def shown(seconds: float) -> str:
    """The time as text, for example `about 4 min left`."""
    minutes = round(seconds / 60)
    return f"about {minutes} min left" if minutes else "less than a minute left"

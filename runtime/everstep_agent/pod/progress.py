"""How long a worker has made no progress, and how much of that time counts. Pure.

Only time in which the worker could have gone on counts: not the time that it queued for a core, and no more than
`MOST_SECONDS` between two looks, because the agent did not get to look. A worker that takes CPU time may be slow (a
compiler, a huge batch), so its time counts a tenth. One that waits for others is watched by itself: it looks whether
anything moves. If it ceases to look, it counts like one that does not wait. One that a signal has stopped is not slow:
all its time counts, also where it has learnt no limit.
"""

from dataclasses import dataclass, replace

from everstep_contract.position import Mark, Stretch

MOST_SECONDS = 0.15
"""A longer time between two looks counts as this much."""
BUSY_SHARE = 0.1
"""More of an interval spent on a core is work."""
BUSY_WEIGHT = 0.1
LOOKS_SECONDS = 0.5
"""A worker that waits for a sum looks several times in this time."""
STOPPED_SECONDS = 1.0
"""Limit of a worker that a signal has stopped, where it has learnt none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Of a worker's main thread, as the kernel counts it."""

    state: str
    """R, S, D, T, …"""
    on_core: float
    """Seconds so far."""
    queued: float
    """Seconds so far that it waited for a core. Not while it still waits."""
    helped: bool = False
    """Another thread, or a child process, runs."""

    @property
    def stopped(self) -> bool:
        return self.state in "Tt"

    @property
    def stopped_by_signal(self) -> bool:
        """And not by a debugger that is attached to it."""
        return self.state == "T"


NO_MARK = Mark(0.0, Stretch.OTHER, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Of one worker."""

    mark: Mark = NO_MARK
    looked: float = 0.0
    usage: Usage | None = None
    seconds: float = 0.0
    """Without progress since the mark, as far as they count."""
    seen_before: bool = False
    """The mark is the one that the look before has found."""

    @property
    def limit(self) -> float:
        """0: there is none."""
        if self.mark.limit > 0 or self.usage is None or not self.usage.stopped_by_signal:
            return self.mark.limit
        return STOPPED_SECONDS

    def overdue(self, most: float) -> float:
        """1: the limit, and no more than `most`, is reached. 0: there is none."""
        limit = min(self.limit, most) if most > 0 else self.limit
        return self.seconds / limit if limit > 0 else 0.0

    @property
    def stopped(self) -> bool:
        return self.usage is not None and self.usage.stopped

    @property
    def stopped_for_long(self) -> bool:
        """By a signal."""
        stopped = self.usage is not None and self.usage.stopped_by_signal
        return stopped and self.seconds >= STOPPED_SECONDS


def waited(mark: Mark, now: float) -> float:
    """For how long the worker has waited for others, in multiples of the limit that it has learnt."""
    learnt = mark.kind in (Stretch.WAIT, Stretch.SUM) and mark.limit > 0
    return max(0.0, now - mark.at) / mark.limit if learnt else 0.0


def measure_still(mark: Mark) -> float:
    """Seconds for which the worker has seen nothing move in the sum that it waits in. By its own looks: a worker
    that gets no core sees nothing.
    """
    return max(0.0, mark.looked - mark.at) if mark.kind is Stretch.SUM else 0.0


def look(before: Progress, mark: Mark, usage: Usage | None, now: float) -> Progress:
    """`usage`: None: it is not known."""
    anew = Progress(mark=mark, looked=now, usage=usage)
    if mark.at != before.mark.at or anew.limit <= 0:
        return anew
    counted = before.seconds + _count(before, mark, usage, now)
    return replace(anew, seconds=counted, seen_before=True)


def _count(before: Progress, mark: Mark, usage: Usage | None, now: float) -> float:
    passed = min(now - before.looked, MOST_SECONDS)
    if usage is None or before.usage is None:
        return 0.0
    if usage.stopped:
        return passed
    if mark.kind in (Stretch.WAIT, Stretch.SUM) and _looks(mark, now):
        return 0.0
    on_core = usage.on_core - before.usage.on_core
    if usage.state == "R" and on_core <= 0:
        return 0.0  # it queues for a core
    passed = max(0.0, passed - (usage.queued - before.usage.queued))
    busy = usage.helped or usage.state == "R" or on_core > BUSY_SHARE * passed
    return passed * (BUSY_WEIGHT if busy else 1.0)


def _looks(mark: Mark, now: float) -> bool:
    """Whether a worker that waits can be believed to look; outside of a sum nobody asks it to."""
    return mark.kind is Stretch.WAIT or now - max(mark.at, mark.looked) < LOOKS_SECONDS


def describe(progress: Progress, where: str) -> str:
    """Why a worker is cut out, for a message."""
    waits = "waiting for others"
    doing = {Stretch.FETCH: "fetching data", Stretch.WAIT: waits, Stretch.SUM: waits}
    what = doing.get(progress.mark.kind, "computing")
    learnt = progress.mark.limit > 0
    spent = progress.looked - progress.mark.at if learnt else progress.seconds
    whose = "learnt from its last steps" if learnt else "of a stopped process"
    text = (
        f"hung: no progress for {spent:.1f} s in {where}, {what}, while the others wait for it; the limit {whose} "
        f"is {progress.limit:.1f} s"
    )
    if progress.stopped:
        return f"{text}; it is stopped by a signal (state T), so it has no stack to show"
    return text

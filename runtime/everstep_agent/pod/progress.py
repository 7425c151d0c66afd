"""How long a worker has made no progress, and how much of that time counts. Pure.

* Only time in which the worker could have made progress counts. The time that it queued for a core
  does not count. Between two looks no more than `MOST_SECONDS` count, because in a longer interval
  the agent itself did not get to look.
* A worker that uses CPU time may only be slow (a compiler, a huge batch), so its time counts a
  tenth.
* A worker that waits for others checks for itself whether anything moves, so its time does not
  count. If it stops checking, its time counts like that of a worker that does not wait.
* A worker that a signal has stopped is not slow: all its time counts, even if it has learnt no
  limit.
* How slow a worker was since it last waited is kept while it waits: if the others were as slow, the
  last one that still works is no exception.
"""

from dataclasses import dataclass, replace

from everstep_contract.position import Mark, Stretch

MOST_SECONDS = 0.15
"""A longer time between two looks counts as this much."""
BUSY_SHARE = 0.1
"""A worker that spent more than this share of an interval on a core was computing."""
BUSY_WEIGHT = 0.1
LOOKS_SECONDS = 0.5
"""A worker that waits for a sum checks several times in this time whether anything moves."""
STOPPED_SECONDS = 1.0
"""Limit for a worker that a signal has stopped and that has learnt none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """How much a worker's main thread uses the cores, as the kernel counts it."""

    state: str
    """R, S, D, T, …"""
    on_core: float
    """Seconds on a core so far."""
    queued: float
    """Seconds of waiting for a core so far. A wait is added when it has ended."""
    helped: bool = False
    """Another thread, or a descendant of the process, is running."""

    @property
    def stopped(self) -> bool:
        return self.state in "Tt"

    @property
    def stopped_by_signal(self) -> bool:
        """Stopped by a signal, not by an attached debugger."""
        return self.state == "T"


NO_MARK = Mark(0.0, Stretch.OTHER, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The progress of one worker."""

    mark: Mark = NO_MARK
    looked: float = 0.0
    usage: Usage | None = None
    seconds: float = 0.0
    """Seconds without progress since the mark, as far as they count."""
    seen_before: bool = False
    """The previous look found the same mark."""
    slowed: float = 0.0
    """The longest time between two marks since the worker last waited for others, in multiples of
    the limit that it has learnt. `measure_slowed` adds the time since the last mark.
    """

    @property
    def limit(self) -> float:
        """How many seconds without progress are allowed; 0: there is no limit."""
        if self.mark.limit > 0 or self.usage is None or not self.usage.stopped_by_signal:
            return self.mark.limit
        return STOPPED_SECONDS

    def overdue(self, most: float) -> float:
        """The seconds without progress, in multiples of the limit; 0: there is no limit.

        A limit above `most` counts as `most`, unless `most` is 0.
        """
        limit = min(self.limit, most) if most > 0 else self.limit
        return self.seconds / limit if limit > 0 else 0.0

    @property
    def stopped(self) -> bool:
        return self.usage is not None and self.usage.stopped

    @property
    def stopped_for_long(self) -> bool:
        """Stopped by a signal for at least `STOPPED_SECONDS`."""
        stopped = self.usage is not None and self.usage.stopped_by_signal
        return stopped and self.seconds >= STOPPED_SECONDS


def waited(mark: Mark, now: float) -> float:
    """How long the worker has waited for others, in multiples of the limit that it has learnt."""
    return _spent(mark, now) if _waits(mark) else 0.0


def measure_still(mark: Mark) -> float:
    """Seconds for which the worker has seen nothing move in the sum that it waits in.

    Measured by the worker's own looks, because a worker that gets no core sees nothing.
    """
    return max(0.0, mark.looked - mark.at) if mark.kind is Stretch.SUM else 0.0


def measure_slowed(found: Progress, now: float) -> float:
    """How long the worker has gone without progress since it last waited for others, in multiples of
    the limit that it has learnt. It may have begun to wait since the last look.
    """
    return found.slowed if _waits(found.mark) else max(found.slowed, _spent(found.mark, now))


def look(before: Progress, mark: Mark, usage: Usage | None, now: float) -> Progress:
    """The progress after one more look. `usage` is None if it is not known."""
    anew = Progress(mark=mark, looked=now, usage=usage, slowed=_measure_slowed(before, mark))
    if mark.at != before.mark.at or anew.limit <= 0:
        return anew
    counted = before.seconds + _count(before, mark, usage, now)
    return replace(anew, seconds=counted, seen_before=True)


def _measure_slowed(before: Progress, mark: Mark) -> float:
    former = before.mark
    if mark.at == former.at:
        return before.slowed
    if _waits(former):  # the stretch after a wait is the first that counts
        return before.slowed if _waits(mark) else 0.0
    return max(before.slowed, _spent(former, mark.at))


def _spent(mark: Mark, until: float) -> float:
    return max(0.0, until - mark.at) / mark.limit if mark.limit > 0 else 0.0


def _waits(mark: Mark) -> bool:
    return mark.kind in (Stretch.WAIT, Stretch.SUM)


def _count(before: Progress, mark: Mark, usage: Usage | None, now: float) -> float:
    passed = min(now - before.looked, MOST_SECONDS)
    if usage is None or before.usage is None:
        return 0.0
    if usage.stopped:
        return passed
    if _waits(mark) and _looks(mark, now):
        return 0.0
    on_core = usage.on_core - before.usage.on_core
    if usage.state == "R" and on_core <= 0:
        return 0.0  # it queues for a core
    passed = max(0.0, passed - (usage.queued - before.usage.queued))
    busy = usage.helped or usage.state == "R" or on_core > BUSY_SHARE * passed
    return passed * (BUSY_WEIGHT if busy else 1.0)


def _looks(mark: Mark, now: float) -> bool:
    """Whether a worker that waits still checks if anything moves. Outside a sum it need not."""
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

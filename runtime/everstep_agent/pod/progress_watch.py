"""Looks at the progress of this pod's workers, often enough for the limits that they have learnt."""

import time
from collections.abc import Callable, Iterable

from everstep_agent.peers.agent_report import LONG_WAIT, State
from everstep_agent.pod import progress
from everstep_agent.pod.usage import read_usage
from everstep_agent.pod.worker import Worker

LOOK_SECONDS = 0.05
MOVING_LOOK_SECONDS = progress.MOST_SECONDS
"""Pause for workers that have made progress since the last look. All of it counts if they stop."""
CALM_LOOK_SECONDS = 0.25
SHORT_LIMIT_SECONDS = 1.0
"""Not a pause: workers with a longer limit, or with none, are looked at less often."""
AGAIN_SECONDS = 2.0
"""How often a worker that sees nothing move is reported at once. Reports without news become rare, and
the coordinator judges a sum only by new ones of all ranks.
"""
TOLD = LONG_WAIT
"""Share of its limit after which a worker that waits, or makes no progress, is reported at once."""


class ProgressWatch:
    """`tell` is called when the coordinator needs a new report."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell

    def look(self, workers: Iterable[Worker], most: float, now: float | None = None) -> float:
        """Look at all workers. Returns the seconds until the next look.

        No learnt limit counts as longer than `most`.
        """
        now = time.monotonic() if now is None else now
        pause = CALM_LOOK_SECONDS
        for worker in workers:
            if worker.in_place and worker.state is State.TRACKED and worker.epoch:
                self._look_at(worker, most, now)
            else:
                _look_if_stopped(worker, now)
            pause = min(pause, choose_pause(worker.progress))
        return pause

    def _look_at(self, worker: Worker, most: float, now: float) -> None:
        before, mark = worker.progress, worker.page.read_mark()
        late = before.overdue(most) >= TOLD
        usage = read_usage(worker.pid, others=late)
        worker.progress = progress.look(before, mark, usage, now)
        worker.overdue = worker.progress.overdue(most)
        worker.waited = progress.waited(mark, now)
        worker.still = progress.measure_still(mark)
        long = mark.at if mark.limit > 0 and now - mark.at > TOLD * mark.limit else 0.0
        beyond = worker.still - mark.group_limit
        stuck = mark.group_limit > 0 and beyond >= 0
        told_still = (mark.at, int(beyond / AGAIN_SECONDS)) if stuck else None
        if (
            worker.overdue >= 1
            or (long and worker.told_wait != long)
            or (told_still and worker.told_still != told_still)
        ):
            worker.told_wait, worker.told_still = long, told_still
            self._tell()


def _look_if_stopped(worker: Worker, now: float) -> None:
    """Only look whether a signal has stopped the worker: nobody waits for it, or it has marked no
    progress yet.
    """
    worker.overdue = worker.waited = worker.still = 0.0
    usage = read_usage(worker.pid, others=False) if worker.in_place else None
    worker.progress = progress.look(worker.progress, progress.NO_MARK, usage, now)


def choose_pause(found: progress.Progress) -> float:
    """Seconds until the next look at a worker."""
    if not 0 < found.limit <= SHORT_LIMIT_SECONDS:
        return CALM_LOOK_SECONDS
    return LOOK_SECONDS if found.seen_before else MOVING_LOOK_SECONDS

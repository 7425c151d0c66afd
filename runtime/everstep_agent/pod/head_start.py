"""Gives the survivors of a loss a head start. The lost rank's next worker starts once they have
completed their step, or after `HEAD_START_SECONDS`. Pure.

If all cores are busy, the start of a worker (a fork, the script's imports, the model) would slow
that step down.
"""

from dataclasses import dataclass

from everstep_agent.peers.epoch_level import Stage
from everstep_agent.peers.messages import Levels

HEAD_START_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class HeadStart:
    since: float
    over: frozenset[str]
    """Incidents that were over when the rank was lost."""


def begin(published: Levels | None, now: float) -> HeadStart:
    return HeadStart(now, _list_over(published) if published is not None else frozenset())


def lasts(start: HeadStart | None, published: Levels, now: float) -> bool:
    """Whether the next worker still has to wait. It need not if the epoch is cut: all restart."""
    if start is None or now >= start.since + HEAD_START_SECONDS:
        return False
    level = published.epoch
    if level is None or level.stage in (Stage.CUT, Stage.OVER):
        return False
    return _list_over(published) <= start.over


def _list_over(published: Levels) -> frozenset[str]:
    return frozenset(i.id for i in published.seen.incidents if not i.open)

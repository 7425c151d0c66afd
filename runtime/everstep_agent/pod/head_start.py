"""The survivors of a loss go first: the lost rank's next worker starts once they have ended their step, or
after a moment. Pure.

Where every core computes, its start (a fork, the script's imports, the model) would make that step longer.
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
    """Whether the next worker has to wait. It has not if the epoch is cut: all restart then."""
    if start is None or now >= start.since + HEAD_START_SECONDS:
        return False
    level = published.epoch
    if level is None or level.stage in (Stage.CUT, Stage.OVER):
        return False
    return _list_over(published) <= start.over


def _list_over(published: Levels) -> frozenset[str]:
    return frozenset(i.id for i in published.seen.incidents if not i.open)

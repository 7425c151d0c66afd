"""Whether a sum is stuck: all ranks wait in it, and nothing moves between them. Pure.

A rank that has stopped is found by `hung.py`, and a silent agent by `silence_rules.py`, although
all other ranks then wait, too.
"""

from collections.abc import Iterable, Sequence

from everstep_agent.coordinator.breaks import Break
from everstep_agent.peers.agent_report import AgentReport, State, WorkerReport
from everstep_agent.peers.epoch_level import EpochLevel, Stage
from everstep_contract.sums import find_first

FRESH_SECONDS = 0.6
"""If a report is older than this, its rank may have moved on since."""


def find_stuck(
    epoch: EpochLevel, reports: Iterable[tuple[AgentReport, float]], factor: float
) -> Break | None:
    """Find a stuck sum by the limits that the ranks have learnt. Only a group that has completed a
    step is judged: its members form the group again and continue in place. In a group that has
    completed no step, all ranks would have to restart.

    Args:
        reports: with their age in seconds.
        factor: multiple of these limits.
    """
    heard = {r.id: r for r, age in reports if age < FRESH_SECONDS and r.epoch == epoch.number}
    inside = [heard[m.id] for m in epoch.members if m.id in heard]
    workers = [w for r in inside for w in r.workers]
    stays = epoch.boundary is not None and epoch.boundary.stay
    if epoch.stage is not Stage.RUNNING or stays or len(workers) < epoch.world:
        return None
    if not all(_stands_still(w, factor) and w.applied > epoch.resume for w in workers):
        return None
    return Break(
        cause="GroupStuck",
        message=_describe(workers, factor),
        certain=False,
        dead_ms=min(w.still_ms for w in workers),
    )


def _stands_still(worker: WorkerReport, factor: float) -> bool:
    waits = worker.state is State.TRACKED and worker.waiting
    return waits and worker.has_stood_still(factor)


def _describe(workers: Sequence[WorkerReport], factor: float) -> str:
    first = find_first(w.sums for w in workers if w.sums is not None)
    where = first.describe_wait() if first is not None else "a sum"
    still = min(w.still_ms for w in workers) / 1000
    limit = max(w.still_limit_ms for w in workers) * factor / 1000
    return (
        f"all {len(workers)} ranks wait in {where}, and nothing has moved between them for {still:.1f} s; the limit "
        f"learnt from their last steps is {limit:.1f} s"
    )

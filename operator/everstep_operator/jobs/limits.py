"""How much of a job moves at once. Pure; it takes the decisions about single slots and defers some
of them.

A wrong verdict rarely comes alone: a bad driver, a bad DCGM roll-out, or a control plane that has
lost contact with its kubelets convicts every node at the same time. So a job that still answers
leaves at most max(1, 10 %) of its nodes at a time, and the next ones once it trains again. Moves
with a deadline (a pod being deleted) and pods that are gone are not limited.
"""

from collections.abc import Sequence

from everstep_operator.jobs.marks import RESUMED
from everstep_operator.jobs.membership import Decision, Leave, Raise, Stay
from everstep_operator.jobs.observed import Observed
from everstep_operator.model_status import Incident, SlotStatus

LEAVING_SHARE = 10
"""A job leaves one of so many nodes at a time: a tenth."""
LIMITED = frozenset({"NodeLeaving", "NodeLost"})
"""Causes with which the operator requests a leave because of the node. Other leaves are a user's
request or have a deadline.
"""


def limit_decisions(
    observed: Observed, records: Sequence[SlotStatus], decisions: Sequence[Decision]
) -> list[Decision]:
    return _pace_rescheduling(observed, _limit_leaving(observed, records, decisions))


def count_allowed(observed: Observed) -> int:
    """How many nodes the job may leave at once."""
    nodes = {p.node for p in observed.pods if p.node and not p.over}
    return max(1, len(nodes) // LEAVING_SHARE)


def _limit_leaving(
    observed: Observed, records: Sequence[SlotStatus], decisions: Sequence[Decision]
) -> list[Decision]:
    """A slot that was asked before stays asked: an agent that has started to leave cannot return."""
    asked = {r.slot for r in records if r.leaving_since is not None}
    leaves = [d for d in decisions if isinstance(d, Leave) and (d.hold or d.cause in LIMITED)]
    leaves.sort(key=lambda d: (d.slot not in asked, d.hold, d.slot))
    chosen, allowed = _moving(observed, records), count_allowed(observed)
    for decision in leaves:
        if decision.slot in asked or len(chosen) < allowed:
            chosen.add(decision.node)
    surplus = {d.slot: _wait_for_turn(d) for d in leaves if d.node not in chosen}
    return [surplus.get(d.slot, d) for d in decisions]


def _moving(observed: Observed, records: Sequence[SlotStatus]) -> set[str]:
    """Nodes that slots have left, as long as the job does not train again. If a slot has trained
    since, it has no incident. If only the other slots have, its incident says so.
    """
    if observed.running:
        return set()
    over = {i.id for i in observed.job.status.incidents if _has_resumed(i)}
    moving = [r for r in records if r.incident and r.incident not in over and r.cause in LIMITED]
    return {r.former_node for r in moving if r.former_node}


def _has_resumed(incident: Incident) -> bool:
    return not incident.open or any(mark.name == RESUMED for mark in incident.marks)


def _wait_for_turn(decision: Leave) -> Stay:
    return Stay(slot=decision.slot, awaits_turn="" if decision.hold else decision.node)


def _pace_rescheduling(observed: Observed, decisions: list[Decision]) -> list[Decision]:
    """Replace one pending pod for each node that was released.

    The new pod shows whether that node has room for this job. The next pending pod is replaced once
    this one is scheduled.
    """
    again = [d for d in decisions if isinstance(d, Raise) and d.freed]
    if not again:
        return decisions
    freed = frozenset[str]().union(*(d.freed for d in again))
    scouts = [p for p in observed.pods if not p.node and not p.over and freed - p.avoids]
    allowed = max(0, len(freed) - len(scouts))
    held_back = {d.slot for d in again[allowed:]}
    return [Stay(slot=d.slot) if d.slot in held_back else d for d in decisions]

"""What counts as a restart, and under which cause. Pure.

Invariant: one fault is one restart under one cause, and `total` is the sum of the causes. A fault
comprises all incidents with one id, or with one quarantine: the death of a rank because of its GPU,
the restart on that GPU and the move away from it are one fault. So what was charged to the worker
is charged to the node once the verdict is known; `charged` on the incident records the present
charge.
"""

from collections.abc import Mapping, Sequence, Set

from everstep_contract.levels import IN_ORDER
from everstep_operator.jobs import budgets, faults
from everstep_operator.jobs.incidents import UNEXPLAINED
from everstep_operator.jobs.marks import list_moved
from everstep_operator.model_status import Incident, RecentRestarts, Restarts

NODE_GONE = "NodeGone"
FREE = IN_ORDER | {"Start", "ScaledDown", "SpareGivenBack", "NoProgress", "BelowMinimum"}
"""Causes of incidents that are not failures. NoProgress may have been only a slow step: each
doubles the limit, and a rank that exceeds `hangSeconds` is WorkerHung. BelowMinimum follows losses
that were counted before: the job waits for their replacements.
"""
MOST_CAUSES = 100
"""Limit of different causes of a job. Each is a field of status and a series of the metrics, and agents report causes,
which belong to whoever wrote the job. There are about 50.
"""
OTHER = "Other"
"""Stands for all further causes."""
FREE_IN_PLACE = frozenset({"GroupStuck"})
"""Causes that are not failures if the members continued in place: their group had completed steps,
and may only have been slow. If it completes none, all ranks restart.
"""


def charge(
    old: Restarts | None,
    incidents: Sequence[Incident],
    attempts: Mapping[int, int],
    window_seconds: float,
    now: float,
) -> tuple[Restarts, list[Incident]]:
    """`attempts`: slot → current attempt. Returns the counters, and the incidents with their charge."""
    causes = dict(old.by_cause) if old else {}
    left = dict(old.moved_by_cause) if old else {}
    joined = (old.joined or 0) if old else 0
    recent = list(old.recent) if old else []
    charged: dict[int, str | None] = {}
    for entries in faults.group_by_fault(incidents):
        wanted = _limit(_choose_cause(entries, attempts), {*causes, *left})
        held = [i.charged for i in entries if i.charged]
        if wanted is None or held == [wanted]:
            continue
        for cause in held:
            causes[cause] = causes.get(cause, 1) - 1
            left[cause] = left.get(cause, 0) + 1
            recent = budgets.remove_recent(recent, cause)
        causes[wanted] = causes.get(wanted, 0) + 1
        joined += max(0, len(held) - 1)
        recent = budgets.add_recent(recent, wanted, window_seconds, now)
        charged.update({id(i): None for i in entries} | {id(entries[0]): wanted})
    told = [_with_charge(i, charged) for i in incidents]
    return _build(causes, left, joined, recent), told


def _limit(cause: str | None, known: Set[str]) -> str | None:
    return cause if cause is None or cause in known or len(known) < MOST_CAUSES else OTHER


def _with_charge(incident: Incident, charged: Mapping[int, str | None]) -> Incident:
    if id(incident) not in charged:
        return incident
    return incident.model_copy(update={"charged": charged[id(incident)]})


def _build(
    causes: Mapping[str, int], left: Mapping[str, int], joined: int, recent: list[RecentRestarts]
) -> Restarts:
    counted = {cause: n for cause, n in sorted(causes.items()) if n > 0}
    return Restarts(
        total=sum(counted.values()),
        by_cause=counted,
        moved_by_cause=dict(sorted(left.items())),
        joined=joined or None,
        recent=recent,
    )


def _choose_cause(entries: Sequence[Incident], attempts: Mapping[int, int]) -> str | None:
    """The cause under which a fault is counted. A completed move explains the job's interruption,
    and a node's fault explains a pod's. This holds even if a spare had taken the place, so that the
    move interrupted nothing.

    None: nothing has been interrupted (yet), or the cause is not known.
    """
    moved = [i.cause for i in entries if _has_moved(i, attempts)]
    node = [cause for cause in moved if budgets.is_node_cause(cause)]
    lived = [i for i in entries if not list_moved(i) and _is_explained(i) and not _free(i)]
    convicted = [NODE_GONE for i in lived if i.quarantine and i.cause not in FREE]
    found = [c for c in (*node, *moved, *convicted, *(i.cause for i in lived)) if c not in FREE]
    return found[0] if found else None


def _free(incident: Incident) -> bool:
    return incident.cause in FREE_IN_PLACE and incident.rung == "regroup"


def _has_moved(incident: Incident, attempts: Mapping[int, int]) -> bool:
    return any(attempts.get(m.slot, m.attempt) > m.attempt for m in list_moved(incident))


def _is_explained(incident: Incident) -> bool:
    """Whether the cause is final: while an incident with an `UNEXPLAINED` cause is open, a more
    precise cause may follow.
    """
    return not incident.open or incident.cause not in UNEXPLAINED

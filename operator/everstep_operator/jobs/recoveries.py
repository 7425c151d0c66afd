"""What a job's recoveries have cost, by rung: how many, seconds without a step, steps lost. Pure.

Invariant: an interruption is counted once. Its entry gets `recoverySeconds` in the same status
write as the totals, and no operator counts an entry that has it. So an entry is counted only when
it cannot change any more: once both the operator and the job report that it is over.

A move is not counted if the job reports that it interrupted nothing (the other ranks had continued
without the slot before), nor is the end of a job. By the operator's marks alone, a move that stopped
nobody counts with 0 s.
"""

import math
from collections.abc import Sequence, Set

from everstep_contract.levels import Seen
from everstep_operator.jobs.marks import RESUMED, RUNNING, list_moved
from everstep_operator.model_status import Incident, RecoveryTotal

RUNGS = ("regroup", "respawn", "replace", "resize", "restart", "move")
OTHER = "other"
"""Stands for each rung that this operator does not know because it comes from a newer runtime."""
BOUNDS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0, 600.0, math.inf)
"""Seconds, upper bounds of the metric's buckets."""
STEPPING = frozenset({"boundary", "drain"})
"""Phases in which the ranks still step."""
WHOLE = frozenset({"restart", "form", "regroup", "first_step", "step"})
"""Phases that the job has measured only if it saw the end of the interruption."""


def count(
    old: Sequence[RecoveryTotal], incidents: Sequence[Incident], seen: Seen | None
) -> tuple[list[RecoveryTotal], list[Incident]]:
    """The new totals, and the incidents; those counted now have their `recovery_seconds`."""
    if seen is None:
        return list(old), list(incidents)
    totals, found = {t.rung: t for t in old}, list[Incident]()
    told_open = {i.id for i in seen.incidents if i.open}
    for incident in incidents:
        seconds = _find_seconds(incident) if _is_settled(incident, told_open) else None
        if seconds is None:
            found.append(incident)
            continue
        rung = choose_rung(incident.rung)
        totals[rung] = _add(totals.get(rung), rung, seconds, incident.steps_lost or 0)
        found.append(incident.model_copy(update={"recovery_seconds": seconds}))
    return sorted(totals.values(), key=lambda t: t.rung), found


def choose_rung(rung: str | None) -> str:
    """If the job has reported no rung, the operator has moved the slot."""
    if not rung:
        return "move"
    return rung if rung in RUNGS else OTHER


def _is_settled(incident: Incident, told_open: Set[str]) -> bool:
    """Whether the incident is over, not counted yet, and no longer open in the job's report."""
    if incident.open or incident.recovery_seconds is not None:
        return False
    return incident.id not in told_open and incident.job_id not in told_open


def _find_seconds(incident: Incident) -> float | None:
    """Seconds without a step of any rank. None: the incident interrupted nothing, or nobody has
    measured it.
    """
    if any(p.name in WHOLE for p in incident.phases):
        return round(sum(p.ms for p in incident.phases if p.name not in STEPPING) / 1000, 3)
    marks = {m.name: m.seconds for m in incident.marks}
    moved_only = incident.rung and not incident.phases
    if moved_only or RUNNING not in marks:
        return None
    moved = list_moved(incident)
    since = marks.get("left", 0.0) if moved and all(m.left for m in moved) else 0.0
    # The other members may step long before the moved slot trains.
    stepped = marks.get(RESUMED, marks[RUNNING])
    return round(max(0.0, stepped - since), 3)


def _add(old: RecoveryTotal | None, rung: str, seconds: float, steps_lost: int) -> RecoveryTotal:
    old = old or RecoveryTotal(rung=rung)
    bound = describe_bound(next(b for b in BOUNDS if seconds <= b))
    return RecoveryTotal(
        rung=rung,
        count=old.count + 1,
        seconds=round(old.seconds + seconds, 3),
        steps_lost=old.steps_lost + steps_lost,
        within={**old.within, bound: old.within.get(bound, 0) + 1},
    )


def describe_bound(bound: float) -> str:
    """As Prometheus writes it in `le`."""
    return "+Inf" if math.isinf(bound) else str(bound)

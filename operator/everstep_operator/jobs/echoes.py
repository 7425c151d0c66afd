"""Links a loss from which the job has recovered by itself to the verdict that comes later on the
lost pod's node. Pure.

If a spare takes the lost slot's place, the slot may be given up before its node is judged. Then no
decision about the slot names the verdict, but the slot's record still has the lost pod's node.

If an operator process ends after it has moved a slot, and before it has written the NodeQuarantine,
the next process judges the same fault anew, under another incident. The move then gets the new one.
"""

from collections.abc import Mapping, Sequence

from everstep_contract import names
from everstep_contract.levels import IN_ORDER
from everstep_operator.jobs.faults import DELETED
from everstep_operator.jobs.marks import list_moved
from everstep_operator.jobs.observed import Observed, Pod
from everstep_operator.jobs.stamps import to_seconds
from everstep_operator.model_status import Incident, SlotStatus
from everstep_operator.values import NodeState

ECHO_SECONDS = 120.0
"""A rank that died within this time before its node's verdict counts as killed by the same fault.
"""
CONVICTED = frozenset({NodeState.LEAVING, NodeState.GONE})


def rename_verdicts(observed: Observed, incidents: Sequence[Incident]) -> list[Incident]:
    """Name the NodeQuarantine that exists, in all incidents of the fault."""
    found = {i.quarantine: name for i in incidents if (name := _find_new_name(observed, i))}
    return [
        i.model_copy(update={"quarantine": found[i.quarantine]}) if i.quarantine in found else i
        for i in incidents
    ]


def _find_new_name(observed: Observed, incident: Incident) -> str:
    """Empty: the incident names the right NodeQuarantine, or it is not known whether it does."""
    if not (incident.open and incident.quarantine and list_moved(incident)):
        return ""
    if any(mark.name == "cordon" for mark in incident.marks):
        return ""  # its own NodeQuarantine existed
    verdict = observed.verdicts.get(incident.node or "")
    if verdict is None or not verdict.quarantined or verdict.incident == incident.quarantine:
        return ""
    return verdict.incident


def link_verdicts(
    observed: Observed, incidents: Sequence[Incident], now: float
) -> Sequence[Incident]:
    """Link incidents whose slot has got its next attempt since. All others are linked by the
    decision that moves the slot.
    """
    if not observed.verdicts:
        return incidents
    records = {r.slot: r for r in observed.job.status.slots}
    moves = _find_moves(incidents)
    return [_linked(observed, i, records, moves, now) for i in incidents]


def _find_moves(incidents: Sequence[Incident]) -> dict[tuple[int, int], str]:
    """(slot, attempt) → the quarantine because of which the slot has left that attempt."""
    moves = [(m, i.quarantine) for i in incidents if i.quarantine for m in list_moved(i)]
    return {(m.slot, m.attempt): quarantine for m, quarantine in moves}


def _linked(
    observed: Observed,
    incident: Incident,
    records: Mapping[int, SlotStatus],
    moves: Mapping[tuple[int, int], str],
    now: float,
) -> Incident:
    if incident.slot is None or incident.quarantine or list_moved(incident):
        return incident
    record = records.get(incident.slot)
    if record is None or _is_planned(incident, record):
        return incident
    began = to_seconds(incident.started_at) or 0.0
    node = _find_lost_node(observed, record, began)
    verdict = observed.verdicts.get(node or "")
    if verdict is None or verdict.state not in CONVICTED or not verdict.incident:
        return incident
    if abs(verdict.marks.get("verdict", now) - began) > ECHO_SECONDS:
        return incident
    # A new operator process may judge the same fault anew, under another incident.
    moved = moves.get((record.slot, record.attempt - 1))
    return incident.model_copy(update={"quarantine": moved or verdict.incident})


def _is_planned(incident: Incident, record: SlotStatus) -> bool:
    """Whether the incident is a planned change, in which nothing was lost. A pod that is deleted
    because its node is lost also announces its leave to the other pods, perhaps before they learn
    that it is gone: such a leave is not planned.
    """
    of_its_deletion = names.incident_id(DELETED, record.slot, record.attempt - 1)
    return incident.cause in IN_ORDER and incident.id != of_its_deletion


def _find_lost_node(observed: Observed, record: SlotStatus, began: float) -> str | None:
    """The node of the lost pod. None: the lost pod may be the slot's present one; then a decision
    about it names the verdict.
    """
    pod = observed.pod_of(record.slot, record.attempt)
    if pod is None:
        return record.former_node if record.pod_uid is None else None
    return record.former_node if _began_later(pod, began) else None


def _began_later(pod: Pod, began: float) -> bool:
    """Whether nothing had run in the pod when the incident began. A container that was restarted in
    its pod had run before.
    """
    if pod.restarts or pod.ended or pod.last_ended:
        return False
    return pod.running_since is None or pod.running_since > began

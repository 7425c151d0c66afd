"""Which incident a decision about a slot belongs to, and which incidents come from one fault. Pure.

One fault has one id, from the side that noticed it first. A slot keeps the incident that moves it
until it trains again; what happens to it in the meantime is part of the same interruption. Slots
that lose the same node share one incident, because the id of a node's fault is chosen from all
slots on that node.

A fault may interrupt the training twice: a faulty GPU kills a rank, and the other ranks continue in
place; seconds later comes the verdict on the node, which moves the slot. `status.incidents` then
has two entries with the same `quarantine`, which are counted and reported as one.
"""

from collections.abc import Collection, Iterable, Mapping

from everstep_contract import names
from everstep_contract.levels import RuntimeIncident
from everstep_operator.jobs import budgets
from everstep_operator.jobs.observed import Observed
from everstep_operator.model_status import Incident, SlotStatus

LONGEST_ID = 128
SCALED_DOWN = "ScaledDown"
DELETED = "PodDeleted"


def group_by_fault(incidents: Iterable[Incident]) -> list[list[Incident]]:
    """Group the incidents by fault: those with the same quarantine, or with the same id if they
    have none, in the order of the list.
    """
    faults: dict[str, list[Incident]] = {}
    for incident in incidents:
        faults.setdefault(incident.quarantine or incident.id, []).append(incident)
    return list(faults.values())


def choose_incident(
    observed: Observed, record: SlotStatus, cause: str, node: str, verdict: str
) -> str:
    """The id of the first of these that exists: the incident that already moves the slot; one that
    moves other slots off that node; the job's open incident; the verdict's incident. Otherwise a
    computed id, which is the same in every pass.

    `verdict`: the incident of the verdict that asks for the decision; empty: no verdict does.
    """
    if record.incident:
        return record.incident
    slots = _share_fault(observed, record, cause, node)
    first = min(slots)
    own = names.incident_id(cause, first, slots[first])
    moving = _moves_others(observed, cause, node)
    return moving or _lived(observed, slots, cause)[:LONGEST_ID] or verdict or own


def _share_fault(
    observed: Observed, record: SlotStatus, cause: str, node: str
) -> Mapping[int, int]:
    """Slot → attempt of all slots that the same fault, or the same request, moves."""
    found = _find_shared(observed, cause, node)
    return found if record.slot in found else {**found, record.slot: record.attempt}


def _find_shared(observed: Observed, cause: str, node: str) -> Mapping[int, int]:
    """A node's fault hits all pods on it; a drain deletes them together; one edit gives up several
    slots.
    """
    if cause == SCALED_DOWN:
        return observed.unwanted
    there = observed.recorded_on.get(node, ()) if node else ()
    if cause == DELETED:
        return {p.slot: p.attempt for p in there if p.deleting}
    return {p.slot: p.attempt for p in there} if budgets.is_node_cause(cause) else {}


def _moves_others(observed: Observed, cause: str, node: str) -> str:
    """Id of the open incident that moves other slots for the same reason; empty: there is none."""
    for incident in observed.job.status.incidents:
        if not incident.open or incident.attempt is None:
            continue
        if incident.cause == cause == SCALED_DOWN:
            return incident.id
        same = budgets.is_node_cause(cause) and budgets.is_node_cause(incident.cause)
        if node and incident.node == node and (same or incident.cause == cause == DELETED):
            return incident.id
    return ""


def _lived(observed: Observed, slots: Collection[int], cause: str) -> str:
    """The id of the job's open incident; empty: there is none. If the job has lost several nodes at
    once in it, the incident belongs to the fault of the first node.
    """
    told = observed.seen.incidents if observed.seen else ()
    of_node = budgets.is_node_cause(cause)

    def is_mine(incident: RuntimeIncident) -> bool:
        if of_node and incident.slots:
            return incident.slot in slots
        return _concerns_any(incident, slots)

    return next((i.id for i in told if i.open and is_mine(i)), "")


def _concerns_any(incident: RuntimeIncident, slots: Collection[int]) -> bool:
    """Whether the incident concerns one of the slots, of which there may be thousands."""
    named = [s for s in (incident.slot, *incident.slots) if s is not None]
    return any(map(incident.concerns, [s for s in named if s in slots] if named else slots))

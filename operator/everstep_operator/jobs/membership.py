"""One slot at a time: stay, be asked to leave, or get the next attempt.

Invariant: a slot's attempt is raised only when its pod is gone by proof, by a decision of ours, or
because the job itself says that it has left. So whatever carries an older attempt than the slot's
may be deleted, and the job is told that it is gone. Raising is a status write of its own; deleting
and creating are the next pass's.
"""

from dataclasses import dataclass

from everstep_contract import names
from everstep_operator.jobs import failures, manifests
from everstep_operator.jobs.observed import Observed, Pod
from everstep_operator.jobs.stamps import to_seconds
from everstep_operator.model_status import SlotStatus
from everstep_operator.values import NodeState, NodeVerdict

UNCOUNTED = frozenset(
    {"Adopted", "ScaledDown", "Suspended", "Rescheduled", "GangIncomplete", "LeaveWithdrawn"}
)
"""Attempts that are nobody's failure."""
FIRST_ATTEMPT = 1
REFUSED_BY_NODE_SECONDS = 10.0
"""A node that has just refused a pod would refuse the next one, too: a GPU may take seconds to come free."""

FENCED_SECONDS = 10.0
"""If another job took the run over, the other pods end as fenced, too, and the job is over."""
STAMP_SECONDS = 1.0
"""Times of containers are whole seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stay:
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """The slot has to leave its node: the job is asked to save and to move membership first."""

    slot: int
    attempt: int
    cause: str
    message: str
    incident: str
    node: str = ""
    verdict: str = ""
    """Incident of the verdict that asks for it: the quarantine has it."""
    hold: bool = False
    """Only keep it out of a new epoch for now: there is a suspicion and no verdict yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Raise:
    """The slot gets attempt `to`."""

    slot: int
    to: int
    cause: str
    message: str
    incident: str
    node: str = ""
    verdict: str = ""
    """Incident of the verdict that asks for it: the quarantine has it."""
    uncommitted: bool = False
    """Left after drainTimeoutSeconds without a commit."""

    @property
    def counted(self) -> bool:
        return self.cause not in UNCOUNTED


Decision = Stay | Leave | Raise


def build_records(observed: Observed) -> tuple[SlotStatus, ...]:
    """One record for each slot that is wanted or was ever used; those never written start afresh."""
    spec = observed.job.spec
    held = {r.slot: r for r in observed.job.status.slots}
    wanted = range(spec.workers.replicas) if spec else range(0)
    used = {p.slot for p in observed.pods}
    slots = sorted({*held, *wanted, *used})
    return tuple(held.get(s) or SlotStatus(slot=s, attempt=_first(observed, s)) for s in slots)


def _first(observed: Observed, slot: int) -> int:
    """A status that was lost re-uses no attempt: pods and the job remember the newest."""
    return newest_attempt(observed, slot) or FIRST_ATTEMPT


def newest_attempt(observed: Observed, slot: int) -> int:
    seen = observed.seen
    attempts = [p.attempt for p in observed.pods if p.slot == slot]
    if seen is not None:
        attempts += [m.attempt for m in seen.members if m.slot == slot]
        attempts += [left.attempt for left in seen.left if left.slot == slot]
    return max(attempts, default=0)


def decide_slot(observed: Observed, record: SlotStatus, now: float) -> Decision:
    """The ladder of one slot, from certainty to suspicion."""
    spec = observed.job.spec
    assert spec is not None
    newest = newest_attempt(observed, record.slot)
    if newest > record.attempt:
        text = "a newer attempt than status knows exists"
        return _raised(observed, record, "Adopted", text, to=newest)
    pod = observed.pod_of(record.slot, record.attempt)
    if pod is None:
        return _decide_without_pod(observed, record)
    if record.slot >= spec.workers.replicas:
        message = f"slot {record.slot} is not wanted any more: replicas is {spec.workers.replicas}"
        return _decide_leaving(observed, record, pod, "ScaledDown", message, now)
    if _comes_too_soon(observed, pod, now):
        return Stay(slot=record.slot)
    if replace := failures.decide_replacement(observed, pod):
        return _raised(observed, record, replace.cause, replace.message)
    if decision := _decide_by_node(observed, record, pod, now):
        return decision
    if pod.deleting:
        return _decide_deleted(observed, record, pod, now)
    if left := observed.left_of(record.slot, record.attempt):
        if not observed.judged:
            return Stay(slot=record.slot)
        # What has left holds nothing and cannot come back.
        if left.asked:
            text = f"pod {pod.name} has left as it was asked to, and is wanted again"
            return _raised(observed, record, "LeaveWithdrawn", text)
        return _raised(observed, record, "PodLeft", f"pod {pod.name} has left the job")
    return _decide_suspect(observed, record, pod) or Stay(slot=record.slot)


def _comes_too_soon(observed: Observed, pod: Pod, now: float) -> bool:
    """The next attempt would meet the same end. Another host's clock may make the pause shorter or twice as
    long, never endless.
    """
    if pod.refused_by_node:
        return abs(now - pod.created_at) < REFUSED_BY_NODE_SECONDS
    if pod.ended is None or not failures.is_fenced(pod):
        return False
    since = now - pod.ended.finished_at
    heard_after = observed.seen_age < since - STAMP_SECONDS
    return abs(since) < FENCED_SECONDS and not (observed.running and heard_after)


def _decide_without_pod(observed: Observed, record: SlotStatus) -> Decision:
    """A pod that was seen and is no more is lost; one that never was is still to be made."""
    known = record.pod_uid is not None or newest_attempt(observed, record.slot) >= record.attempt
    if not known:
        return Stay(slot=record.slot)
    where = f" on node {record.node}" if record.node else ""
    text = f"the pod of slot {record.slot}{where} is no more"
    return _raised(observed, record, "PodDeleted", text)


def _decide_by_node(
    observed: Observed, record: SlotStatus, pod: Pod, now: float
) -> Decision | None:
    if not pod.node:
        return _decide_unbound(observed, record, pod)
    verdict = observed.verdicts.get(pod.node)
    state = verdict.state_of(observed.job.namespace, pod.name) if verdict else None
    if verdict is not None and state is NodeState.GONE:
        return _raised(observed, record, "NodeGone", verdict.message, verdict.incident)
    if verdict is not None and state is NodeState.LEAVING:
        return _decide_leaving(observed, record, pod, "NodeLeaving", verdict.message, now, verdict)
    return _decide_unreachable(observed, record, pod, now)


def nodes_to_avoid(observed: Observed) -> frozenset[str]:
    """A suspicion is no reason to write a node off in a pod that may wait for long."""
    states = (NodeState.LEAVING, NodeState.GONE)
    return frozenset(n for n, v in observed.verdicts.items() if v.state in states)


def nodes_to_shun(observed: Observed, record: SlotStatus) -> frozenset[str]:
    """Those in suspicion, and the one that this slot had to leave: an operator that counted it may have died
    before it marked the node.
    """
    shunned = {n for n, v in observed.verdicts.items() if v.state is NodeState.SUSPECT}
    if record.former_node and record.cause in failures.BUDGETS["node"]:
        shunned.add(record.former_node)
    return frozenset(shunned)


def _decide_unbound(observed: Observed, record: SlotStatus, pod: Pod) -> Decision | None:
    """It waits for a node, and shuts out one that has been released since: only a new pod can use that."""
    users = manifests.avoided_by(observed.job.raw_template.get("spec") or {})
    freed = pod.avoids - users - nodes_to_avoid(observed)
    if not freed or not pod.scheduling or pod.over or pod.deleting:
        return None
    free = ", ".join(sorted(freed))
    text = f"pod {pod.name} waits for a node and may not use {free}"
    return _raised(observed, record, "Rescheduled", text)


def _decide_unreachable(
    observed: Observed, record: SlotStatus, pod: Pod, now: float
) -> Decision | None:
    spec = observed.job.spec
    assert spec is not None
    node = observed.nodes.get(pod.node)
    if node is None:
        text = f"node {pod.node} is no more in the cluster"
        return _raised(observed, record, "NodeLost", text)
    limit = spec.recovery.node_lost_seconds
    if node.not_ready_for is None or node.not_ready_for < limit:
        return None
    message = (
        f"node {pod.node} has been unreachable for more than {limit} s: {node.why.rstrip('.')}"
    )
    if observed.running and observed.is_member(record.slot, record.attempt):
        # The job's step advances, so its ranks are alive, reachable by the API server or not.
        return _decide_leaving(observed, record, pod, "NodeLost", message, now)
    return _raised(observed, record, "NodeLost", message)


def _decide_deleted(observed: Observed, record: SlotStatus, pod: Pod, now: float) -> Decision:
    """Somebody deletes the pod (kubectl, a drain, an eviction): its agent saves on SIGTERM by itself."""
    message = f"pod {pod.name} is being deleted"
    left = observed.has_left(record.slot, record.attempt) or pod.ended is not None
    if left or not pod.node or (pod.deleting_until or 0.0) <= now:
        return _raised(observed, record, "PodDeleted", message)
    return _leave(observed, record, pod, "PodDeleted", message)


def _decide_leaving(
    observed: Observed,
    record: SlotStatus,
    pod: Pod,
    cause: str,
    message: str,
    now: float,
    verdict: NodeVerdict | None = None,
) -> Decision:
    """Save, then drain. State that nobody else holds stays until the commit, the verdict gone or the pod's death."""
    named = verdict.incident if verdict else ""
    if observed.has_left(record.slot, record.attempt) or not _may_hold_state(observed, pod):
        return _raised(observed, record, cause, message, named)
    if _drained_too_long(observed, record, now) and _held_elsewhere(observed, record):
        text = f"{message}; left without a commit after drainTimeoutSeconds, others hold the state"
        return _raised(observed, record, cause, text, named, uncommitted=True)
    return _leave(observed, record, pod, cause, message, named)


def _may_hold_state(observed: Observed, pod: Pod) -> bool:
    """Whether this pod may be, or may just have been, a member of an epoch: then only `left` frees it."""
    if pod.over or pod.running_since is None:
        return False
    return bool(observed.job.status.epoch or (observed.seen and observed.seen.epoch))


def _drained_too_long(observed: Observed, record: SlotStatus, now: float) -> bool:
    spec, since = observed.job.spec, to_seconds(record.leaving_since)
    return (
        spec is not None and since is not None and now - since > spec.recovery.drain_timeout_seconds
    )


def _held_elsewhere(observed: Observed, record: SlotStatus) -> bool:
    """Another member, on a node that is not in question, holds the same state (replicated jobs)."""
    for member in observed.seen.members if observed.seen else ():
        pod = observed.pod_of(member.slot, member.attempt)
        if member.slot == record.slot or pod is None or pod.over or pod.deleting:
            continue
        verdict = observed.verdicts.get(pod.node)
        if verdict is None or not verdict.avoided:
            return True
    return False


def _decide_suspect(observed: Observed, record: SlotStatus, pod: Pod) -> Decision | None:
    """A running epoch is left alone on a mere suspicion; a new one is not begun on such a node."""
    verdict = observed.verdicts.get(pod.node)
    if verdict is None or verdict.state is not NodeState.SUSPECT or observed.running:
        return None
    named = verdict.incident
    return _leave(observed, record, pod, verdict.reason, verdict.message, named, hold=True)


def _leave(
    observed: Observed,
    record: SlotStatus,
    pod: Pod,
    cause: str,
    message: str,
    verdict: str = "",
    hold: bool = False,
) -> Leave:
    return Leave(
        slot=record.slot,
        attempt=record.attempt,
        cause=cause,
        message=message,
        incident=choose_incident(observed, record, cause, verdict),
        node=pod.node,
        verdict=verdict,
        hold=hold,
    )


def _raised(
    observed: Observed,
    record: SlotStatus,
    cause: str,
    message: str,
    verdict: str = "",
    *,
    to: int | None = None,
    uncommitted: bool = False,
) -> Raise:
    return Raise(
        slot=record.slot,
        to=record.attempt + 1 if to is None else to,
        cause=cause,
        message=message,
        incident=choose_incident(observed, record, cause, verdict),
        node=record.node or "",
        verdict=verdict,
        uncommitted=uncommitted,
    )


def choose_incident(observed: Observed, record: SlotStatus, cause: str, verdict: str) -> str:
    """One interruption, one id: that of whoever noticed it first.

    What moves the slot already; what the job itself lives through at this moment; the verdict on
    the node; else a name that is the same in every pass.
    """
    told = observed.seen.incidents if observed.seen else ()
    lived = next((i.id for i in told if i.open and i.concerns(record.slot)), "")
    own = names.incident_id(cause, record.slot, record.attempt)
    return record.incident or lived[:128] or verdict or own


def apply_raise(record: SlotStatus, decision: Raise) -> SlotStatus:
    return SlotStatus(
        slot=record.slot,
        attempt=decision.to,
        cause=decision.cause,
        former_node=record.node,
    )

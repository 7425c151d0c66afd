"""Decides for one slot at a time whether it stays, is asked to leave, or gets the next attempt.

Invariant: a slot's attempt is raised only when its pod is gone by proof, by the operator's
decision, or because the job reports that it has left or that the newest claim leaves it out. So a
pod with an older attempt than its slot's may be deleted, and the job is told that it is gone.
Raising is a status write of its own; the next pass deletes and creates.
"""

import math
from dataclasses import dataclass, replace

from everstep_operator.jobs import failures, placement, starts, yields
from everstep_operator.jobs.faults import choose_incident
from everstep_operator.jobs.observed import Observed, Pod
from everstep_operator.jobs.stamps import to_seconds
from everstep_operator.model_status import SlotStatus
from everstep_operator.values import NodeState, NodeVerdict

GIVEN_BACK = "SpareGivenBack"
UNCOUNTED = frozenset(
    {
        "Adopted",
        "ScaledDown",
        GIVEN_BACK,
        "Suspended",
        "Rescheduled",
        "GangIncomplete",
        "LeaveWithdrawn",
    }
)
"""Causes of attempts that are not failures. A pod that never started does not count either: it has
interrupted nothing.
"""
ENDS_AN_INCIDENT = frozenset({"ScaledDown", GIVEN_BACK, "Suspended", "LeaveWithdrawn"})
FIRST_ATTEMPT = 1
FENCED_SECONDS = 10.0
"""Wait after a pod ended as fenced: if another job took over the run, the other pods end the same
way, and the job is over.
"""
HOLD_SECONDS = 60.0
"""How long a suspicion keeps a slot out of a new epoch: longer than `health` needs to judge a
death.
"""
STAMP_SECONDS = 1.0
"""Resolution of container times in status."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stay:
    slot: int
    awaits_turn: str = ""
    """The node that the slot has to leave, once other slots of the job have left theirs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """The slot has to leave its node: the job is asked to save and to change its membership first."""

    slot: int
    attempt: int
    cause: str
    message: str
    incident: str
    node: str = ""
    verdict: str = ""
    """Incident of the verdict that asks for it, as in the quarantine."""
    spare: bool = False
    """The slot is a spare that the job does not need now: nothing is interrupted."""
    hold: bool = False
    """Only keep the slot out of a new epoch for now: its node is suspect and not yet judged."""


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
    """Incident of the verdict that asks for it, as in the quarantine."""
    uncommitted: bool = False
    """Left after drainTimeoutSeconds without a commit."""
    failed: str = ""
    """Why the pod did not start on `node`, in one word; empty: the attempt has another cause."""
    was_member: bool = True
    spare: bool = False
    """As for `Leave`."""
    freed: frozenset[str] = frozenset()
    """Nodes that only a new pod can use: the present one excludes them."""

    @property
    def counted(self) -> bool:
        return self.cause not in UNCOUNTED and (self.was_member or not self.failed)


Decision = Stay | Leave | Raise


def build_records(observed: Observed) -> tuple[SlotStatus, ...]:
    """One record for each slot that is wanted or was ever used; slots without a record get one."""
    held = {r.slot: r for r in observed.job.status.slots}
    used = {p.slot for p in observed.pods}
    slots = sorted({*held, *observed.slots.wanted, *used})
    return tuple(held.get(s) or SlotStatus(slot=s, attempt=_first(observed, s)) for s in slots)


def _first(observed: Observed, slot: int) -> int:
    """The attempt of a new record. After status was lost, no attempt is reused: the pods and the
    job know the newest.
    """
    return observed.newest_attempt(slot) or FIRST_ATTEMPT


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """The values that all slots share in one pass."""

    observed: Observed
    now: float
    failed_nodes: frozenset[str] = frozenset()
    """Nodes on which pods of several slots failed to start."""


def build_scene(observed: Observed, now: float) -> Scene:
    failed = frozenset(starts.list_shared(observed.job.status.slots, now))
    return Scene(observed=observed, now=now, failed_nodes=failed)


def decide_slot(scene: Scene, record: SlotStatus) -> Decision:
    """The checks for one slot, from proof to suspicion."""
    observed, now = scene.observed, scene.now
    newest = observed.newest_attempt(record.slot)
    if newest > record.attempt:
        text = "a pod of a newer attempt than the recorded one exists"
        return _raised(observed, record, "Adopted", text, to=newest)
    pod = observed.pod_of(record.slot, record.attempt)
    if pod is None:
        return _decide_without_pod(observed, record)
    if record.slot not in observed.slots.wanted:
        if _may_yet_train(observed, pod):
            return Stay(slot=record.slot)
        decision = _decide_by_node(scene, record, pod) if pod.node else None
        if isinstance(decision, Raise):
            return decision  # nobody there can save and leave
        if decision is not None and _lost_its_place(observed, pod):
            return decision
        return _decide_leaving(observed, record, pod, *_why_not_wanted(observed, record.slot), now)
    if _comes_too_soon(observed, record, pod, now):
        return Stay(slot=record.slot)
    if over := failures.decide_replacement(observed, pod):
        why = _find_request(scene, record, pod) if over.cause == "PodLeft" else None
        return why or _raised(observed, record, over.cause, over.message, pod=pod)
    if decision := _decide_by_node(scene, record, pod):
        return decision
    if pod.deleting:
        return _decide_deleted(observed, record, pod, now)
    if not observed.judged and (asked := _still_asked(observed, record, pod)):
        return asked
    if left := observed.left_of(record.slot, record.attempt):
        if not observed.judged:
            return Stay(slot=record.slot)
        # A slot that has left holds no state and cannot return.
        if left.asked:
            return _withdrawn(observed, record, pod)
        return _raised(observed, record, "PodLeft", f"pod {pod.name} has left the job", pod=pod)
    late = _decide_start(scene, record, pod)
    return late or _decide_suspect(observed, record, pod) or Stay(slot=record.slot)


def _find_request(scene: Scene, record: SlotStatus, pod: Pod) -> Raise | None:
    """Why a pod that has left and ended was asked to leave, which its kubelet may report before the job
    reports the leave. None: nothing is known that asked for it.
    """
    observed = scene.observed
    decision = _decide_by_node(scene, record, pod)
    if isinstance(decision, Raise):
        return decision
    left, asked = observed.left_of(pod.slot, pod.attempt), _still_asked(observed, record, pod)
    if asked is not None and asked.cause not in ENDS_AN_INCIDENT:
        return _raised(observed, record, asked.cause, asked.message, asked.verdict, pod=pod)
    if asked is not None or (left is not None and left.asked):
        return _withdrawn(observed, record, pod)
    return None


def _withdrawn(observed: Observed, record: SlotStatus, pod: Pod) -> Raise:
    text = f"pod {pod.name} has left as requested, and is wanted again"
    return _raised(observed, record, "LeaveWithdrawn", text, pod=pod)


def _lost_its_place(observed: Observed, pod: Pod) -> bool:
    """Whether a pod is not wanted because of its node, not of the size of the job: there is evidence against the node,
    and another pod has taken the place.
    """
    spec = observed.job.spec
    fits = spec is not None and len(observed.slots_inside) <= spec.workers.replicas
    return fits and pod in observed.doubted


def _why_not_wanted(observed: Observed, slot: int) -> tuple[str, str]:
    """Cause and message."""
    spec = observed.job.spec
    assert spec is not None
    if slot in observed.lent:
        return GIVEN_BACK, f"slot {slot} is a spare, and a pod of another job waits for its room"
    text = f"slot {slot} is no longer wanted: replicas is {spec.workers.replicas}"
    spares = spec.workers.spares
    return "ScaledDown", f"{text}, spares is {spares}" if spares else text


def _may_yet_train(observed: Observed, pod: Pod) -> bool:
    """Whether a pod whose slot is not wanted may be a member: until the job reports, an operator
    that has just started cannot tell members from spares.
    """
    spec, status = observed.job.spec, observed.job.status
    configured = spec is not None and spec.workers.spares > 0
    has_spares = configured or status.spares is not None or observed.doubted
    began = bool(status.epoch) and not pod.over
    return began and observed.seen is None and bool(has_spares)


def _is_spare(observed: Observed, record: SlotStatus) -> bool:
    """Whether the slot is a spare that the job does not need now: according to the job's report or,
    before there is one, to status. While the job lacks a member, it needs a pod that waits, unless
    the pod's slot is no longer wanted. A pod that has lost its place to another one is no spare.
    """
    if record.incident is not None:
        return False
    if observed.seen is None:
        told = observed.job.status.spares
        return told is not None and record.slot in told.slots
    if observed.is_member(record.slot, record.attempt):
        return False
    if observed.whole:
        return True
    pod = observed.pod_of(record.slot, record.attempt)
    replaced = pod is not None and _lost_its_place(observed, pod)
    return record.slot not in observed.slots.wanted and not replaced


def _comes_too_soon(observed: Observed, record: SlotStatus, pod: Pod, now: float) -> bool:
    """Whether the next attempt would end the same way because it comes too soon. Another host's
    clock may shorten or double this pause, but not prolong it without limit.
    """
    if pod.misconfigured and not failures.has_answered(observed):
        return True  # perhaps the settings work nowhere
    if pod.refused_by_node or pod.misconfigured or failures.is_own_fault(observed, pod):
        return abs(now - pod.created_at) < starts.build_refused_pause(record, now)
    if pod.ended is None or not failures.is_fenced(pod):
        return False
    since = now - pod.ended.finished_at
    heard_after = observed.seen_age < since - STAMP_SECONDS
    return abs(since) < FENCED_SECONDS and not (observed.running and heard_after)


def _decide_without_pod(observed: Observed, record: SlotStatus) -> Decision:
    """A recorded pod that no longer exists is lost; a pod that never existed is yet to be created."""
    known = record.pod_uid is not None or observed.newest_attempt(record.slot) >= record.attempt
    if not known:
        return Stay(slot=record.slot)
    where = f" on node {record.node}" if record.node else ""
    text = f"the pod of slot {record.slot}{where} no longer exists"
    return _raised(observed, record, "PodDeleted", text)


def _decide_by_node(scene: Scene, record: SlotStatus, pod: Pod) -> Decision | None:
    observed, now = scene.observed, scene.now
    if not pod.node:
        return _decide_unbound(scene, record, pod)
    verdict = observed.verdicts.get(pod.node)
    state = verdict.state_of(observed.job.namespace, pod.name) if verdict else None
    if verdict is not None and state is NodeState.GONE:
        return _raised(observed, record, "NodeGone", verdict.message, verdict.incident, pod=pod)
    if why := yields.describe_left_out(observed, pod):
        return _raised(
            observed, record, "NodeLost", why, verdict.incident if verdict else "", pod=pod
        )
    if verdict is not None and state is NodeState.LEAVING:
        return _decide_leaving(observed, record, pod, "NodeLeaving", verdict.message, now, verdict)
    return _decide_unreachable(observed, record, pod, now)


def _decide_unbound(scene: Scene, record: SlotStatus, pod: Pod) -> Decision | None:
    """Replace a pending pod that excludes a node that it could use: only a new pod can use that
    node.
    """
    freed = placement.find_freed(scene.observed, scene.failed_nodes, record, pod, scene.now)
    if not freed:
        return None
    text = f"pod {pod.name} waits for a node and may not use {', '.join(sorted(freed))}"
    return replace(_raised(scene.observed, record, placement.RESCHEDULED, text), freed=freed)


def _decide_start(scene: Scene, record: SlotStatus, pod: Pod) -> Decision | None:
    """Replace a pod that does not start, at any time in the job's life: the next one may start on
    another node.
    """
    why = starts.describe_late(scene.observed, pod)
    spec = scene.observed.job.spec
    if not why or spec is None:
        return None
    limit = spec.recovery.startup_seconds
    text = (
        f"pod {pod.name} on node {pod.node} was not ready within {limit} s (recovery.startupSeconds), "
        f"so it is replaced, on another node if one has room: {why}"
    )
    return _raised(scene.observed, record, "PodNotStarted", text, pod=pod)


def _decide_unreachable(
    observed: Observed, record: SlotStatus, pod: Pod, now: float
) -> Decision | None:
    spec = observed.job.spec
    assert spec is not None
    node = observed.nodes.get(pod.node)
    if node is None:
        text = f"node {pod.node} is no longer in the cluster"
        return _raised(observed, record, "NodeLost", text, pod=pod)
    limit = spec.recovery.node_lost_seconds
    lost_for = observed.lost_for(node)
    if lost_for is None or lost_for < limit:
        return None
    message = (
        f"node {pod.node} has not been Ready for more than {limit} s (recovery.nodeLostSeconds): "
        f"{node.why.rstrip('.')}"
    )
    if observed.running and observed.is_member(record.slot, record.attempt):
        # The job's step advances, so its ranks are alive, whether or not the API server can reach
        # them.
        return _decide_leaving(observed, record, pod, "NodeLost", message, now)
    return _raised(observed, record, "NodeLost", message, pod=pod)


def _decide_deleted(observed: Observed, record: SlotStatus, pod: Pod, now: float) -> Decision:
    """The pod is being deleted (kubectl, a drain, an eviction): its agent saves on SIGTERM by
    itself.
    """
    message = f"pod {pod.name} is being deleted"
    left = observed.has_left(record.slot, record.attempt) or pod.ended is not None
    if left or not pod.node or observed.is_past_grace(pod, now):
        return _raised(observed, record, "PodDeleted", message, pod=pod)
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
    """Save, then drain. A pod that may hold the only copy of the state stays until the commit, the
    verdict *gone*, or its death.
    """
    named = verdict.incident if verdict else ""
    if observed.has_left(record.slot, record.attempt) or not _may_hold_state(observed, pod):
        return _raised(observed, record, cause, message, named, pod=pod)
    if _drained_too_long(observed, record, now) and _held_elsewhere(observed, record):
        text = (
            f"{message}; no checkpoint was committed within recovery.drainTimeoutSeconds, so the pod is replaced "
            "without one; other pods hold the state"
        )
        made = _raised(observed, record, cause, text, named, pod=pod)
        return replace(made, uncommitted=True)
    return _leave(observed, record, pod, cause, message, named)


def _may_hold_state(observed: Observed, pod: Pod) -> bool:
    """Whether this pod is, or may just have been, a member of an epoch: then only `left` releases
    it.
    """
    if pod.over or pod.running_since is None:
        return False
    return failures.may_train(observed, [pod])


def _drained_too_long(observed: Observed, record: SlotStatus, now: float) -> bool:
    """The clock of the leader that asked may be behind, so this process must have seen the time pass,
    too.
    """
    spec, since = observed.job.spec, to_seconds(record.leaving_since)
    if spec is None or since is None:
        return False
    seen = observed.leaving_for.get((record.slot, record.attempt), math.inf)
    return min(now - since, seen) > spec.recovery.drain_timeout_seconds


def _held_elsewhere(observed: Observed, record: SlotStatus) -> bool:
    """Whether other members hold a whole copy of the state: all slots of another unit, on nodes that
    are not faulty, suspect or lost. The slot's own unit holds no other copy.
    """
    return any(record.slot not in unit for unit in observed.sound_units)


def _still_asked(observed: Observed, record: SlotStatus, pod: Pod) -> Leave | None:
    """A request to leave that a former operator made stands until this one has judged the nodes: it
    may not know the reason yet, and the time limit of the request goes on.
    """
    open_ = (i for i in observed.job.status.incidents if i.open and i.id == record.incident)
    why = next(open_, None)
    if record.leaving_since is None or why is None:
        return None
    return _leave(observed, record, pod, why.cause, why.message, why.quarantine or "")


def _decide_suspect(observed: Observed, record: SlotStatus, pod: Pod) -> Decision | None:
    """A suspicion does not end a running epoch, but no new one is started on such a node.

    Only for a limited time: a suspicion may last, and the job must not wait for its end.
    """
    verdict = observed.verdicts.get(pod.node)
    if verdict is None or verdict.state is not NodeState.SUSPECT or observed.running:
        return None
    if observed.suspected_for.get(pod.uid, 0.0) > HOLD_SECONDS:
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
        incident=choose_incident(observed, record, cause, pod.node, verdict),
        node=pod.node,
        verdict=verdict,
        spare=_is_spare(observed, record),
        hold=hold,
    )


def _raised(
    observed: Observed,
    record: SlotStatus,
    cause: str,
    message: str,
    verdict: str = "",
    *,
    pod: Pod | None = None,
    to: int | None = None,
) -> Raise:
    """`pod`: the slot's present one, if any; its node may be newer than the record's."""
    node = (pod.node if pod else "") or record.node or ""
    failed = starts.choose_reason(pod) if pod and cause in starts.CAUSES else ""
    return Raise(
        slot=record.slot,
        to=record.attempt + 1 if to is None else to,
        cause=cause,
        message=message,
        incident=choose_incident(observed, record, cause, node, verdict),
        node=node,
        verdict=verdict,
        failed=failed,
        was_member=observed.is_member(record.slot, record.attempt),
        spare=_is_spare(observed, record),
    )


def apply_raise(record: SlotStatus, decision: Raise, now: float) -> SlotStatus:
    failures_to_start = list(record.start_failures)
    if decision.failed and decision.node:
        failures_to_start = starts.note_failure(record, decision.node, decision.failed, now)
    return SlotStatus(
        slot=record.slot,
        attempt=decision.to,
        cause=decision.cause,
        former_node=decision.node or record.node,
        start_failures=failures_to_start,
        incident=decision.incident if decision.counted else _kept_incident(record, decision),
    )


def _kept_incident(record: SlotStatus, decision: Raise) -> str | None:
    """The open incident continues until the slot trains again; a requested stop ends it."""
    return None if decision.cause in ENDS_AN_INCIDENT else record.incident

"""One pass over one job: a ladder of guard clauses from what ends it to what keeps it going.

Invariants. Every prefix of a plan is a legal state. A plan that raises a counter or an attempt is
nothing but that status write; what follows from it is the next pass's. No member of the current
epoch is deleted unless the job says `left`, we decided *gone*, or the job is over: a pod is deleted
only once its attempt is no longer its slot's.
"""

from collections.abc import Sequence

from everstep_operator.jobs import conditions, ending, failures, manifests, membership, waiting
from everstep_operator.jobs.actions import (
    Action,
    CheckTemplate,
    CreatePod,
    CreateSecret,
    DeletePod,
    Plan,
)
from everstep_operator.jobs.membership import Decision, Leave, Raise
from everstep_operator.jobs.observed import Observed, Pod
from everstep_operator.jobs.stamps import to_stamp
from everstep_operator.jobs.wanted import build_wanted
from everstep_operator.model_status import SlotStatus
from everstep_operator.values import NodeState

QUIET_SECONDS = 10.0
BUSY_SECONDS = 1.0


def plan(observed: Observed, now: float) -> Plan:
    """Pure: the same observation at the same moment gives the same plan."""
    job = observed.job
    if job.deleting:
        return Plan(status=job.status)
    if conditions.is_true(job.status, "Complete") or conditions.is_true(job.status, "Failed"):
        return ending.plan_finished(observed, now)
    if job.spec is None:
        return ending.plan_unreadable(observed, "SpecInvalid", job.spec_error, now)
    if end := failures.decide_end(observed, now):
        return ending.plan_end(observed, end, now)
    if job.spec.suspend:
        return ending.plan_suspend(observed, now)
    if conflict := manifests.find_conflict(job.raw_template):
        return ending.plan_unreadable(observed, "TemplateConflict", conflict, now)
    return _plan_slots(observed, now)


def _plan_slots(observed: Observed, now: float) -> Plan:
    records = membership.build_records(observed)
    decisions = [membership.decide_slot(observed, r, now) for r in records]
    if any(isinstance(d, Raise) for d in decisions):
        return plan_count(observed, records, decisions, now)
    return _plan_deeds(observed, records, decisions, now)


def plan_count(
    observed: Observed, records: Sequence[SlotStatus], decisions: Sequence[Decision], now: float
) -> Plan:
    """Count first: attempts and restarts rise, and the pass ends."""
    raises = {d.slot: d for d in decisions if isinstance(d, Raise)}
    raised = [membership.apply_raise(r, raises[r.slot]) if r.slot in raises else r for r in records]
    story = waiting.build_job_story(observed, raised, decisions, now)
    status = conditions.build_status(observed, raised, decisions, story, now)
    return Plan(
        status=status,
        counts=True,
        events=conditions.build_events(observed.job.status, status, decisions),
    )


def _plan_deeds(
    observed: Observed, records: Sequence[SlotStatus], decisions: Sequence[Decision], now: float
) -> Plan:
    noted = [note_pod(observed, r, decisions, now) for r in records]
    story = waiting.build_job_story(observed, noted, decisions, now)
    status = conditions.build_status(observed, noted, decisions, story, now).model_copy(
        update={"stopping_since": None}
    )
    leaving = [d for d in decisions if isinstance(d, Leave)]
    return Plan(
        actions=(*plan_former(observed, noted), *_plan_creation(observed, noted, now)),
        status=status,
        wanted=build_wanted(observed, noted, leaving),
        events=conditions.build_events(observed.job.status, status, decisions),
        wake_after=QUIET_SECONDS if observed.running and not leaving else BUSY_SECONDS,
    )


def note_pod(
    observed: Observed, record: SlotStatus, decisions: Sequence[Decision], now: float
) -> SlotStatus:
    """What must be known of a pod after it has vanished, and since when it has been asked to leave."""
    pod = observed.pod_of(record.slot, record.attempt)
    leave = next(
        (d for d in decisions if isinstance(d, Leave) and d.slot == record.slot and not d.hold),
        None,
    )
    return record.model_copy(
        update={
            "pod_uid": pod.uid if pod else record.pod_uid,
            "node": (pod.node if pod else None) or record.node,
            "leaving_since": (record.leaving_since or to_stamp(now)) if leave else None,
            "incident": leave.incident if leave else None,
        }
    )


def plan_former(observed: Observed, records: Sequence[SlotStatus]) -> tuple[Action, ...]:
    """Pods of attempts that are over: fenced, told gone, and now deleted."""
    current = {r.slot: r for r in records}
    found: list[Action] = []
    for pod in observed.pods:
        record = current.get(pod.slot)
        if record is not None and pod.attempt < record.attempt:
            found += _delete_former(observed, pod, record)
    return tuple(found)


def _delete_former(observed: Observed, pod: Pod, record: SlotStatus) -> list[Action]:
    why = f"slot {pod.slot} is at attempt {record.attempt}: {record.cause or 'replaced'}"
    if not pod.deleting:
        return [DeletePod(name=pod.name, uid=pod.uid, reason="FormerAttempt", message=why)]
    spec, node = observed.job.spec, observed.nodes.get(pod.node)
    lost = node is None or node.not_ready_for is not None
    if spec is None or not spec.recovery.force_delete or not lost:
        return []
    return [DeletePod(name=pod.name, uid=pod.uid, reason="ForceDelete", message=why, force=True)]


def _plan_creation(
    observed: Observed, records: Sequence[SlotStatus], now: float
) -> tuple[Action, ...]:
    spec, job = observed.job.spec, observed.job
    assert spec is not None
    missing = [
        r
        for r in records
        if r.slot < spec.workers.replicas and observed.pod_of(r.slot, r.attempt) is None
    ]
    if waiting.is_held_back(observed, now):
        return ()
    secret = _plan_secret(observed, bool(missing))
    if not missing:
        return secret
    found: list[Action] = [*secret]
    avoid = membership.nodes_to_avoid(observed)
    shun = [n for n, v in observed.verdicts.items() if v.state is NodeState.SUSPECT]
    bodies = [manifests.build_pod(job, spec, r.slot, r.attempt, avoid, shun) for r in missing]
    if not observed.template_checked:
        found.append(
            CheckTemplate(
                body=bodies[0], reason="CheckTemplate", message="dry run of the first pod"
            )
        )
    return (*found, *(_creation(r, b) for r, b in zip(missing, bodies, strict=True)))


def _plan_secret(observed: Observed, missing: bool) -> tuple[Action, ...]:
    """Before the first pods, after a restart of ours (it may be there), and when a pod cannot find it."""
    name = manifests.secret_name(observed.job.name, observed.job.uid)
    lost = any(name in pod.waiting_message for pod in observed.pods)
    if not lost and (observed.template_checked or not missing):
        return ()
    return (CreateSecret(name=name, reason="Token", message="the job's token"),)


def _creation(record: SlotStatus, body: manifests.Body) -> CreatePod:
    why = f"slot {record.slot} has no pod of attempt {record.attempt}"
    return CreatePod(
        slot=record.slot, attempt=record.attempt, body=body, reason="CreatePod", message=why
    )

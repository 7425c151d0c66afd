"""One pass over one job: a series of guard clauses, first those that end the job.

Invariants. Every prefix of a plan is a legal state. A plan that raises a counter or an attempt
consists of that status write only; the next pass acts on it. No member of the current epoch is
deleted unless the job reports `left`, the operator decided *gone*, or the job is over: a pod is
deleted only once its attempt is no longer its slot's.
"""

from collections.abc import Sequence
from typing import Any

from everstep_operator.jobs import (
    attempts,
    conditions,
    deadlines,
    ending,
    failures,
    gang,
    limits,
    manifests,
    membership,
    neighbours,
    placement,
    starts,
    waiting,
    yields,
)
from everstep_operator.jobs.actions import (
    Action,
    CheckTemplate,
    CreatePod,
    CreateSecret,
    Plan,
)
from everstep_operator.jobs.membership import Decision, Leave, Raise
from everstep_operator.jobs.observed import Observed
from everstep_operator.jobs.wanted import build_wanted
from everstep_operator.model import JobSpec
from everstep_operator.model_status import SlotStatus

QUIET_SECONDS = 10.0
BUSY_SECONDS = 1.0
CREATED_AT_ONCE = 32
"""How many pods one pass creates at most, or a share of a large job's slots, whose plans take long. The next pass
follows at once, unless other jobs wait for theirs.
"""
CREATED_SHARE = 16


def plan(observed: Observed, now: float) -> Plan:
    """Pure: the same observation at the same time gives the same plan."""
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
    if gang.is_giving_back(observed, now):
        return gang.plan_giving_back(observed, now)
    if decided := gang.decide_gang(observed, now):
        return gang.plan_first(observed, decided, now)
    return _plan_slots(observed, now)


def _plan_slots(observed: Observed, now: float) -> Plan:
    records = membership.build_records(observed)
    scene = membership.build_scene(observed, now)
    each = [membership.decide_slot(scene, r) for r in records]
    decisions = limits.limit_decisions(observed, records, each)
    if any(isinstance(d, Raise) for d in decisions):
        return attempts.plan_count(observed, records, decisions, now)
    return _plan_actions(observed, records, decisions, now)


def _plan_actions(
    observed: Observed, records: Sequence[SlotStatus], decisions: Sequence[Decision], now: float
) -> Plan:
    noted = attempts.note_pods(observed, records, decisions, now)
    story = waiting.build_job_story(observed, noted, decisions, now)
    status = conditions.build_status(observed, noted, decisions, story, now).model_copy(
        update=_resumed(observed, now)
    )
    leaving = [d for d in decisions if isinstance(d, Leave)]
    at_once = max(CREATED_AT_ONCE, len(noted) // CREATED_SHARE)
    made = _plan_creation(observed, noted, now, at_once)
    pause = _choose_pause(
        observed, now, busy=bool(leaving) or yields.has_silent_node(observed, noted)
    )
    return Plan(
        actions=(*attempts.plan_former(observed, noted), *made),
        status=status,
        wanted=build_wanted(observed, noted, leaving),
        events=conditions.build_events(observed.job.status, status, decisions),
        wake_after=0.0 if len(made) >= at_once else pause,
    )


def _choose_pause(observed: Observed, now: float, *, busy: bool) -> float | None:
    """Seconds until the next pass; None: only a change causes it. A change causes a pass in any
    case. `busy`: a limit of some seconds is running.
    """
    if busy:
        return BUSY_SECONDS
    if observed.running:
        return min(QUIET_SECONDS, waiting.find_retry(observed, now))
    if deadlines.waits_for_room(observed, now):
        return deadlines.find_next(observed, now)
    return BUSY_SECONDS


def _resumed(observed: Observed, now: float) -> dict[str, Any]:
    """The fields of status that change once the job continues after a suspension, or after its pods
    were given back.
    """
    job = observed.job
    spent = failures.suspended_seconds(job, now) if job.status.stopping_since else None
    return {
        "stopping_since": None,
        "suspended_seconds": job.status.suspended_seconds if spent is None else round(spent),
        "gang": None if observed.running else job.status.gang,
    }


def _plan_creation(
    observed: Observed, records: Sequence[SlotStatus], now: float, at_once: int
) -> tuple[Action, ...]:
    spec = observed.job.spec
    assert spec is not None
    if waiting.is_all_held_back(observed, now):
        return ()
    spares = observed.slots.spares
    missing = _list_missing(observed, records, now)
    secret = _plan_secret(observed, bool(missing))
    if not missing or not observed.judged:
        return secret
    found: list[Action] = [*secret]
    missing = missing[:at_once]
    bodies = _build_bodies(observed, spec, missing, now)
    if not observed.template_checked:
        found.append(
            CheckTemplate(
                body=bodies[0],
                reason="CheckTemplate",
                message="dry run of the first pod",
                spare=missing[0].slot in spares,
                urgent=_replaces(missing[0]),
            )
        )
    made = zip(missing, bodies, strict=True)
    return (*found, *(_creation(r, b, r.slot in spares) for r, b in made))


def _list_missing(
    observed: Observed, records: Sequence[SlotStatus], now: float
) -> list[SlotStatus]:
    """The slots whose pods may be created now: pods that replace lost ones come first, and spares last."""
    slots = observed.slots
    absent = [r for r in records if observed.pod_of(r.slot, r.attempt) is None]
    if waiting.is_held_back(observed, now):
        absent = [r for r in absent if _replaces(r)]
    missing = [r for r in absent if r.slot in slots.training]
    missing.sort(key=lambda r: not _replaces(r))
    if not waiting.is_spare_held_back(observed, now):
        missing += [r for r in absent if r.slot in slots.spares]
    return missing


def _replaces(record: SlotStatus) -> bool:
    """Whether the slot's next pod replaces one that a fault took."""
    return record.incident is not None


def _build_bodies(
    observed: Observed, spec: JobSpec, missing: Sequence[SlotStatus], now: float
) -> list[manifests.Body]:
    left, suspected = placement.nodes_left(observed), placement.nodes_suspected(observed)
    failed = starts.list_shared(observed.job.status.slots, now)
    seats, nodes = neighbours.find_seats(observed), observed.node_of_slot

    def build(record: SlotStatus) -> manifests.Body:
        avoid = placement.nodes_to_avoid(left, failed, record, now)
        shun = placement.nodes_to_shun(suspected, failed, record, now)
        return manifests.build_pod(
            observed.job,
            spec,
            record.slot,
            record.attempt,
            avoid,
            shun,
            mates=neighbours.choose_mates(seats.get(record.slot), nodes, avoid | shun),
            spare=record.slot in observed.slots.spares,
        )

    return [build(record) for record in missing]


def _plan_secret(observed: Observed, missing: bool) -> tuple[Action, ...]:
    """Create the Secret before the first pods, after a restart of the operator (it may exist then),
    and when a pod cannot find it.
    """
    name = manifests.secret_name(observed.job.name, observed.job.uid)
    lost = any(name in pod.waiting_message for pod in observed.pods)
    if not lost and (observed.template_checked or not missing):
        return ()
    made = not lost and any(r.pod_uid for r in observed.job.status.slots)
    return (CreateSecret(name=name, reason="Token", message="the job's token", made_before=made),)


def _creation(record: SlotStatus, body: manifests.Body, spare: bool) -> CreatePod:
    why = f"slot {record.slot} has no pod of attempt {record.attempt}"
    return CreatePod(
        slot=record.slot,
        attempt=record.attempt,
        body=body,
        reason="CreatePod",
        message=f"{why}; it is a spare" if spare else why,
        spare=spare,
        urgent=_replaces(record),
    )

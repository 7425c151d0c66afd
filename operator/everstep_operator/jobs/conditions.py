"""Builds the complete status from what was observed and decided. Conditions and Events use the same
text.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, replace

from everstep_contract.levels import POD_NOTE, Seen
from everstep_operator.jobs import failures, incident_summary, manifests, nodehealth, recoveries
from everstep_operator.jobs.incidents import build_incidents
from everstep_operator.jobs.marks import is_withdrawn, list_moved
from everstep_operator.jobs.membership import Decision, Leave, Raise
from everstep_operator.jobs.observed import Job, Observed
from everstep_operator.jobs.restarts import charge
from everstep_operator.jobs.spares import build_spares, count_seconds
from everstep_operator.jobs.stamps import to_seconds, to_stamp
from everstep_operator.model import RestartBudgets
from everstep_operator.model_status import (
    CheckpointStatus,
    Condition,
    Incident,
    JobStatus,
    PinnedStatus,
    SlotStatus,
    WorldStatus,
)
from everstep_operator.values import EventDraft

WARNINGS = frozenset({"Failed", "Recovering"})
WISHES = frozenset({"ScaledDown", "SpareGivenBack", "Grow", "Shrink", "Edit"})
"""Causes of a recovery that are not failures."""
OVER = frozenset({"Complete", "Failed"})
AT_REST = OVER | {"Suspended"}
"""States in which nothing is interrupted any more, and nothing recovers."""
MOST_CATEGORIES, LONGEST_CATEGORY = 16, 32
"""Limits for the time ledger's categories in status."""
STALE_INTERVALS = 3
STALE_GRACE_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionDraft:
    """A condition without its times."""

    type: str
    status: bool | None
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """What a pass has decided, as texts for the conditions."""

    state: str
    verdicts: tuple[ConditionDraft, ...]
    message: str = ""


def build_status(
    observed: Observed,
    records: Sequence[SlotStatus],
    decisions: Sequence[Decision],
    story: Story,
    now: float,
) -> JobStatus:
    """Counters never fall; figures that are no longer reported keep their last value."""
    old, job = observed.job.status, observed.job
    spec = job.spec
    figures = _figures(observed, now)
    attempts = {r.slot: r.attempt for r in records}
    found = build_incidents(observed, attempts, decisions, now)
    restarts, incidents = charge(old.restarts, found, attempts, _window(job), now)
    totals = old.recoveries
    if not any(is_true(old, end) for end in OVER):
        totals, incidents = recoveries.count(totals, incidents, observed.seen)
    if story.state in AT_REST:
        incidents = [i.model_copy(update={"open": False}) for i in incidents]
    status = old.model_copy(
        update={
            **figures,
            "observed_generation": choose_generation(observed, story),
            "world": _world(observed, story),
            "spares": build_spares(observed),
            "spare_seconds": count_seconds(observed, now),
            "selector": manifests.build_selector(job.name),
            "run": f"{spec.checkpoint.uri.rstrip('/')}/{manifests.run_of(job, spec)}"
            if spec
            else old.run,
            "restarts": restarts,
            "recoveries": totals,
            "slots": list(records),
            "incidents": incidents,
            "conditions": _with_nodes(observed, now),
        }
    )
    return with_story(status, job, story, now)


NOT_ACTED_ON = frozenset({"SpecInvalid", "TemplateConflict", "TemplateInvalid"})
"""Reasons of `Running` with which an edit of the spec has no effect."""


def choose_generation(observed: Observed, story: Story) -> int | None:
    """Generation of the newest spec that is in effect: in the operator and, if the job runs, in the
    job.
    """
    job, seen = observed.job, observed.seen
    reason = next((v.reason for v in story.verdicts if v.type == "Running"), "")
    unchecked = reason == "CreatingPods" and not observed.template_checked
    if reason in NOT_ACTED_ON or unchecked:
        return job.status.observed_generation
    over = story.state in OVER
    agents = [p for p in observed.pods if p.running_since is not None and not p.over and not over]
    told = seen is not None and seen.generation >= job.generation
    return job.generation if told or not agents else job.status.observed_generation


def _window(job: Job) -> float:
    """The window of the restart budgets in seconds; the default if the spec cannot be read."""
    budgets = job.spec.recovery.restart_budgets if job.spec else RestartBudgets()
    return float(budgets.window_seconds)


def with_story(status: JobStatus, job: Job, story: Story, now: float) -> JobStatus:
    """The same status with the texts of `story`. If nothing is being recovered, `Recovering`
    describes the last recovery.
    """
    types = {verdict.type for verdict in story.verdicts}
    others = [condition for condition in status.conditions if condition.type not in types]
    verdicts = [_remembering(v, status.incidents) for v in story.verdicts]
    told = [build_condition(job.status, v, job.generation, now) for v in verdicts]
    return status.model_copy(
        update={
            "state": story.state,
            "message": story.message[:1024] or None,
            "conditions": told + others,
        }
    )


def _with_nodes(observed: Observed, now: float) -> list[Condition]:
    """The present conditions, with the one about the job's nodes."""
    job, found = observed.job, nodehealth.decide_nodes(observed)
    if found is None:
        return job.status.conditions
    status, reason, message = found
    verdict = ConditionDraft(type=nodehealth.TYPE, status=status, reason=reason, message=message)
    told = build_condition(job.status, verdict, job.generation, now)
    return [c for c in job.status.conditions if c.type != nodehealth.TYPE] + [told]


def _remembering(verdict: ConditionDraft, incidents: Sequence[Incident]) -> ConditionDraft:
    over = incident_summary.list_over(incidents)
    if verdict.type != "Recovering" or verdict.status or not over:
        return verdict
    return replace(verdict, message=f"last: {incident_summary.summarize(over[-1])}")


def _figures(observed: Observed, now: float) -> dict[str, object]:
    old, seen = observed.job.status, observed.seen
    kept = {"pinned": _pinned(observed), "step": _step(observed)}
    if seen is None:
        return {"checkpoint": _aged(old.checkpoint, now), **kept}
    started = old.started_at or (to_stamp(now) if seen.running else None)
    return {
        "epoch": max(seen.epoch, old.epoch or 0) or None,
        "until": seen.until if seen.until is not None else old.until,
        "loss": seen.loss if seen.loss is not None else old.loss,
        "checkpoint": _checkpoint(observed, now),
        "kept_step": (seen.kept_step or None) if seen.running else None,
        "goodput": _goodput(seen.seconds) or old.goodput,
        "seconds": _seconds(seen.seconds) or old.seconds,
        "started_at": started,
        "notes": list(seen.notes[-5:]) or _keep_notes(old.notes, seen),
        **kept,
    }


def _step(observed: Observed) -> int | None:
    """The furthest step that every worker has applied; once the job is Complete, its final step."""
    old, seen = observed.job.status, observed.seen
    if is_true(old, "Complete"):
        return old.step
    if (final := failures.find_final_step(observed)) is not None:
        return final
    if seen is None or not seen.epoch:
        return old.step
    return max(seen.step, 0 if seen.running else old.step or 0)


def _keep_notes(old: Sequence[str], seen: Seen) -> list[str]:
    """The notes of a job that reports none now. If it trains, what its pods no longer report is over."""
    return [note for note in old if not (seen.running and POD_NOTE.match(note))]


def _pinned(observed: Observed) -> PinnedStatus | None:
    """The checkpoint pinned under the name that the spec has now. A coordinator that has not read
    the log yet reports none, so the last known one stays.
    """
    spec, old, seen = observed.job.spec, observed.job.status.pinned, observed.seen
    wanted = spec.checkpoint.pin if spec else None
    if seen is not None and seen.pinned is not None and seen.pinned.name == wanted:
        return PinnedStatus.model_validate(dataclasses.asdict(seen.pinned))
    return old if old is not None and old.name == wanted else None


def _checkpoint(observed: Observed, now: float) -> CheckpointStatus | None:
    """The time of a commit is computed once, from the age that came with it, and then kept."""
    old, seen = observed.job.status.checkpoint, observed.seen
    new = seen.committed if seen else None
    if new is None:
        return _aged(old, now)
    if old is not None and old.committed_at:
        held, told = (old.epoch, old.step), (new.epoch, new.step)
        # A new coordinator reports an older one until it has read the log.
        if held == told or (held > told and not _went_back(seen, old)):
            return _aged(old, now)
    committed = now - observed.seen_age - new.age_ms / 1000
    return _aged(
        CheckpointStatus(
            step=new.step, epoch=new.epoch, bytes=new.bytes, committed_at=to_stamp(committed)
        ),
        now,
    )


def _went_back(seen: Seen | None, old: CheckpointStatus) -> bool:
    """Whether the job trains again from an older checkpoint, because this one is broken."""
    return seen is not None and seen.running and seen.step < old.step


def _aged(checkpoint: CheckpointStatus | None, now: float) -> CheckpointStatus | None:
    since = to_seconds(checkpoint.committed_at) if checkpoint else None
    if checkpoint is None or since is None:
        return checkpoint
    return checkpoint.model_copy(update={"age_seconds": max(0, int(now - since))})


def _goodput(seconds: dict[str, float]) -> str | None:
    total = sum(seconds.values())
    return f"{100 * seconds.get('step', 0.0) / total:.1f}%" if total > 0 else None


def _seconds(seconds: dict[str, float]) -> dict[str, float]:
    """Seconds by the runtime's categories, whatever its version; their number is limited, so that
    status stays small.
    """
    names = sorted(name for name in seconds if len(name) <= LONGEST_CATEGORY)
    return {name: round(seconds[name], 1) for name in names[:MOST_CATEGORIES]}


def _world(observed: Observed, story: Story) -> WorldStatus:
    """`ready` counts members. A job that ran keeps its last number as long as it counts as running
    although no agent answers; so does one whose spec has no effect, for the pods that still run.
    """
    spec, old = observed.job.spec, observed.job.status.world
    before = old.ready if old else 0
    desired = spec.workers.replicas if spec and not spec.suspend else 0
    ready = len({m.slot for m in observed.seen.members}) if observed.seen else 0
    if not observed.running:
        up = sum(p.running_since is not None and not p.over for p in observed.pods)
        ready = {"Running": before, "Invalid": min(before, up)}.get(story.state, 0)
    return WorldStatus(ready=ready, desired=desired, summary=f"{ready}/{desired}")


def build_condition(
    old: JobStatus, verdict: ConditionDraft, generation: int, now: float
) -> Condition:
    status = {True: "True", False: "False", None: "Unknown"}[verdict.status]
    before = find_condition(old, verdict.type)
    changed = before is None or before.status != status
    return Condition(
        type=verdict.type,
        status=status,
        observed_generation=generation,
        last_transition_time=to_stamp(now)
        if changed or before is None
        else before.last_transition_time,
        reason=verdict.reason,
        message=verdict.message[:4096],
    )


def find_condition(status: JobStatus, kind: str) -> Condition | None:
    return next((c for c in status.conditions if c.type == kind), None)


def is_true(status: JobStatus, kind: str) -> bool:
    found = find_condition(status, kind)
    return found is not None and found.status == "True"


def build_story(
    *,
    state: str,
    running: ConditionDraft,
    checkpoint: ConditionDraft,
    suspended: ConditionDraft | None = None,
    recovering: ConditionDraft | None = None,
    complete: ConditionDraft | None = None,
    failed: ConditionDraft | None = None,
) -> Story:
    """All six conditions, always in this order; those not given are False."""
    verdicts = (
        running,
        recovering or ConditionDraft(type="Recovering", status=False, reason=state, message=""),
        checkpoint,
        suspended
        or ConditionDraft(type="Suspended", status=False, reason="NotSuspended", message=""),
        complete or ConditionDraft(type="Complete", status=False, reason="NotFinished", message=""),
        failed or ConditionDraft(type="Failed", status=False, reason="NotFailed", message=""),
    )
    loud = next((v for v in (failed, complete, suspended, recovering) if v and v.status), running)
    return Story(state=state, verdicts=verdicts, message=loud.message)


def decide_checkpoint(
    observed: Observed, decisions: Sequence[Decision], now: float
) -> ConditionDraft:
    """The condition CheckpointHealthy: whether the computed steps are saved. Unknown until the
    first commit. While no agent has answered this operator, what an earlier one has reported stands.
    """
    seen, old = observed.seen, find_condition(observed.job.status, "CheckpointHealthy")
    if any(isinstance(d, Raise) and d.uncommitted for d in decisions):
        message = next(d.message for d in decisions if isinstance(d, Raise) and d.uncommitted)
        return ConditionDraft(
            type="CheckpointHealthy", status=False, reason="LeftWithoutCommit", message=message
        )
    if seen is None and old is not None:
        return _as_before(old)
    if seen is not None and seen.storage_error is not None:
        error = seen.storage_error
        return ConditionDraft(
            type="CheckpointHealthy",
            status=False,
            reason=error.kind or "StoreError",
            message=error.message,
        )
    if seen is not None and seen.refused:
        return ConditionDraft(
            type="CheckpointHealthy",
            status=False,
            reason="StateNotFinite",
            message=f"the newest save was refused: {seen.refused}",
        )
    newest = _checkpoint(observed, now)
    if standing := _still_without_commit(observed, newest):
        return standing
    if newest is None:
        return ConditionDraft(
            type="CheckpointHealthy",
            status=None,
            reason="NoCheckpointYet",
            message=_with_warning(observed, "no checkpoint committed yet"),
        )
    if observed.running and (late := _late(observed, newest)):
        return ConditionDraft(
            type="CheckpointHealthy", status=False, reason="CheckpointLate", message=late
        )
    return ConditionDraft(
        type="CheckpointHealthy",
        status=True,
        reason="CheckpointCommitted",
        message=_with_warning(observed, "the newest checkpoint is committed"),
    )


def _with_warning(observed: Observed, text: str) -> str:
    warning = manifests.describe_unmounted(observed.job)
    return f"{text}; {warning}" if warning else text


def _still_without_commit(
    observed: Observed, newest: CheckpointStatus | None
) -> ConditionDraft | None:
    old = find_condition(observed.job.status, "CheckpointHealthy")
    before = observed.job.status.checkpoint
    if old is None or old.reason != "LeftWithoutCommit":
        return None
    if newest is not None and (before is None or before.step != newest.step):
        return None
    return _as_before(old)


def _as_before(old: Condition) -> ConditionDraft:
    status = {"True": True, "False": False}.get(old.status)
    return ConditionDraft(type=old.type, status=status, reason=old.reason, message=old.message)


def _late(observed: Observed, newest: CheckpointStatus) -> str:
    """Why the newest checkpoint is too old; empty if it is not. After an evaluation or a pause, in
    which no step was taken, the next one has some time to come. A job that trains again after it had stopped
    makes it after an interval.
    """
    spec, old = observed.job.spec, find_condition(observed.job.status, "CheckpointHealthy")
    every = spec.checkpoint.save_seconds if spec else 0
    if not every or newest.age_seconds <= STALE_INTERVALS * every + STALE_GRACE_SECONDS:
        return ""
    stands = old is not None and old.reason == "CheckpointLate"
    soon = observed.running_for <= every + STALE_GRACE_SECONDS
    if (soon or observed.steps_for <= STALE_GRACE_SECONDS) and not stands:
        return ""
    return (
        f"no checkpoint has been committed for more than {STALE_INTERVALS} intervals of {every} s "
        f"(checkpoint.everySeconds); the newest is of step {newest.step}. status.notes and the pods' logs say why"
    )


def build_events(
    old: JobStatus, new: JobStatus, decisions: Sequence[Decision]
) -> tuple[EventDraft, ...]:
    """One Event for each condition that has become true or changed its reason, and one for each
    interruption.

    If two Events would have the same text, only the one with more detail is created.
    """
    found = [h for c in new.conditions if (h := _announced(find_condition(old, c.type), c))]
    found = [h for k, h in enumerate(found) if h.message not in {o.message for o in found[k + 1 :]}]
    told = {h.message for h in found}
    found += _of_recoveries(old, new)
    known = {(i.id, m.slot) for i in old.incidents for m in list_moved(i)}
    for decision in decisions:
        match decision:
            case Leave(hold=False, spare=False) if (decision.incident, decision.slot) not in known:
                found += [] if describe_leave(decision) in told else [_of_leave(decision)]
            case Raise() if decision.counted or decision.failed:
                found.append(_of_raise(decision))
            case _:
                pass
    return tuple(found)


def _announced(old: Condition | None, new: Condition) -> EventDraft | None:
    if old is not None and (old.status, old.reason) == (new.status, new.reason):
        return None
    quiet = new.status != "True" and new.type != "CheckpointHealthy" and new.type != "Running"
    if quiet or new.status == "Unknown" or not new.message:
        return None
    bad = new.type in WARNINGS or (new.type == "CheckpointHealthy" and new.status == "False")
    bad = bad and new.reason not in WISHES
    return EventDraft(
        reason=new.reason,
        message=new.message,
        warning=bad,
        stamp=f"{new.type}-{new.last_transition_time}",
    )


def _of_recoveries(old: JobStatus, new: JobStatus) -> list[EventDraft]:
    """One Event for each fault whose last interruption has ended since `old`. The end of the job and
    a suspension are no recovery, nor is a move that was withdrawn. No second Event follows if a slot
    moves later because of an interruption whose end was already reported.
    """
    known = {fault[-1].id for fault in incident_summary.list_over(old.incidents)}
    known |= {i.id for i in old.incidents if i.recovery_seconds is not None}
    over = [] if new.state in AT_REST else incident_summary.list_over(new.incidents)
    return [
        EventDraft(
            reason="Recovered",
            message=incident_summary.summarize(fault),
            incident=fault[-1].id,
            stamp=fault[-1].id,
        )
        for fault in over
        if not known & {fault[-1].id, fault[-1].job_id}
        and fault[-1].cause not in WISHES
        and not is_withdrawn(fault[-1])
    ]


def describe_leave(decision: Leave) -> str:
    return f"slot {decision.slot} is asked to save and leave: {decision.message} [{_tag(decision)}]"


def _tag(decision: Leave | Raise) -> str:
    """The incident's id, and the quarantine's if it has another id."""
    if decision.verdict in ("", decision.incident):
        return decision.incident
    return f"{decision.incident}, quarantine {decision.verdict}"


def _of_leave(decision: Leave) -> EventDraft:
    return EventDraft(
        reason=decision.cause,
        message=describe_leave(decision),
        warning=decision.cause not in WISHES,
        incident=decision.incident,
        stamp=f"{decision.slot}-{decision.incident}",
    )


def _of_raise(decision: Raise) -> EventDraft:
    return EventDraft(
        reason=decision.cause,
        message=f"slot {decision.slot} gets a new pod (attempt {decision.to}): {decision.message} "
        f"[{_tag(decision)}]",
        warning=not decision.spare,
        incident=decision.incident,
        stamp=f"{decision.slot}-{decision.to}",
    )

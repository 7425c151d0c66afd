"""The whole status, from what was observed and decided. The same words go into conditions and
Events.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from everstep_operator.jobs import failures, manifests, telling
from everstep_operator.jobs.incidents import build_incidents
from everstep_operator.jobs.membership import Decision, Leave, Raise
from everstep_operator.jobs.observed import Job, Observed
from everstep_operator.jobs.stamps import to_seconds, to_stamp
from everstep_operator.model_status import (
    CheckpointStatus,
    Condition,
    Incident,
    JobStatus,
    Restarts,
    SlotStatus,
    WorldStatus,
)
from everstep_operator.values import Happening

WARNINGS = frozenset({"Failed", "Recovering"})
WISHES = frozenset({"ScaledDown", "Grow", "Shrink"})
"""Reasons to recover that are nobody's failure."""
NO_RESTARTS = frozenset({"Start", "Grow", "Shrink"})
"""Causes of an epoch that mend nothing: the job begins, or was given another size."""
OVER = frozenset({"Complete", "Failed"})
STALE_INTERVALS = 3
STALE_GRACE_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One condition to be, before it has a time."""

    type: str
    status: bool | None
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """What a pass has decided, in the words that conditions need."""

    state: str
    verdicts: tuple[Verdict, ...]
    message: str = ""


def build_status(
    observed: Observed,
    records: Sequence[SlotStatus],
    decisions: Sequence[Decision],
    story: Story,
    now: float,
) -> JobStatus:
    """Counters never fall, figures that nobody reports any more keep their last value."""
    old, seen, job = observed.job.status, observed.seen, observed.job
    spec = job.spec
    figures = _figures(observed, now)
    incidents = build_incidents(observed, records, decisions, now)
    if story.state in OVER:
        incidents = [i.model_copy(update={"open": False}) for i in incidents]
    status = old.model_copy(
        update={
            **figures,
            "observed_generation": job.generation,
            "world": _world(observed, story),
            "selector": manifests.build_selector(job.name),
            "run": f"{spec.checkpoint.uri.rstrip('/')}/{manifests.run_of(job, spec)}"
            if spec
            else old.run,
            "restarts": _restarts(old, seen.restarts if seen else {}, decisions),
            "slots": list(records),
            "incidents": incidents,
        }
    )
    return with_story(status, job, story, now)


def with_story(status: JobStatus, job: Job, story: Story, now: float) -> JobStatus:
    """The same status, in the words of `story`. Where nothing is being recovered, the last recovery is told."""
    verdicts = [_remembering(v, status.incidents) for v in story.verdicts]
    told = [build_condition(job.status, v, job.generation, now) for v in verdicts]
    return status.model_copy(
        update={
            "state": story.state,
            "message": story.message[:1024] or None,
            "conditions": told,
        }
    )


def _remembering(verdict: Verdict, incidents: Sequence[Incident]) -> Verdict:
    over = telling.list_over(incidents)
    if verdict.type != "Recovering" or verdict.status or not over:
        return verdict
    return replace(verdict, message=f"last: {telling.tell(over[-1])}")


def _figures(observed: Observed, now: float) -> dict[str, object]:
    old, seen = observed.job.status, observed.seen
    if seen is None:
        return {"checkpoint": _aged(old.checkpoint, now)}
    started = old.started_at or (to_stamp(now) if seen.running else None)
    return {
        "epoch": max(seen.epoch, old.epoch or 0) or None,
        "step": max(seen.step, 0 if seen.running else old.step or 0) if seen.epoch else old.step,
        "until": seen.until if seen.until is not None else old.until,
        "loss": seen.loss if seen.loss is not None else old.loss,
        "checkpoint": _checkpoint(observed, now),
        "goodput": _goodput(seen.seconds) or old.goodput,
        "started_at": started,
        "notes": list(seen.notes[-5:]) or old.notes,
    }


def _checkpoint(observed: Observed, now: float) -> CheckpointStatus | None:
    """The time of a commit is reckoned once, from the age that came with it, and then stays."""
    old, seen = observed.job.status.checkpoint, observed.seen
    new = seen.committed if seen else None
    if new is None:
        return _aged(old, now)
    if old is not None and (old.epoch, old.step) >= (new.epoch, new.step) and old.committed_at:
        return _aged(old, now)  # a new coordinator tells of an older one until it has read the log
    committed = now - observed.seen_age - new.age_ms / 1000
    return _aged(
        CheckpointStatus(
            step=new.step, epoch=new.epoch, bytes=new.bytes, committed_at=to_stamp(committed)
        ),
        now,
    )


def _aged(checkpoint: CheckpointStatus | None, now: float) -> CheckpointStatus | None:
    since = to_seconds(checkpoint.committed_at) if checkpoint else None
    if checkpoint is None or since is None:
        return checkpoint
    return checkpoint.model_copy(update={"age_seconds": max(0, int(now - since))})


def _goodput(seconds: dict[str, float]) -> str | None:
    total = sum(seconds.values())
    return f"{100 * seconds.get('step', 0.0) / total:.1f}%" if total > 0 else None


def _world(observed: Observed, story: Story) -> WorldStatus:
    """A job that runs as far as we know, while nobody has answered us, has the members that it had."""
    spec, old = observed.job.spec, observed.job.status.world
    desired = spec.workers.replicas if spec and not spec.suspend else 0
    ready = len({m.slot for m in observed.seen.members}) if observed.seen else 0
    if not observed.running:
        ready = old.ready if old and story.state == "Running" else 0
    return WorldStatus(ready=ready, desired=desired, summary=f"{ready}/{desired}")


def _restarts(old: JobStatus, runtime: dict[str, int], decisions: Sequence[Decision]) -> Restarts:
    """Ours are counted here, before the deed; the job's are those of its run log."""
    causes = dict(old.restarts.by_cause) if old.restarts else {}
    for cause, count in runtime.items():
        if cause not in NO_RESTARTS:
            causes[cause] = max(count, causes.get(cause, 0))
    for decision in decisions:
        if isinstance(decision, Raise) and decision.counted:
            causes[decision.cause] = causes.get(decision.cause, 0) + 1
    ours = sum(causes.get(c, 0) for c in failures.BUDGETS["node"] | failures.BUDGETS["pod"])
    theirs = sum(n for c, n in causes.items() if c in runtime)
    total = max(old.restarts.total if old.restarts else 0, ours, theirs)
    return Restarts(total=total, by_cause=dict(sorted(causes.items())))


def build_condition(old: JobStatus, verdict: Verdict, generation: int, now: float) -> Condition:
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
    running: Verdict,
    checkpoint: Verdict,
    suspended: Verdict | None = None,
    recovering: Verdict | None = None,
    complete: Verdict | None = None,
    failed: Verdict | None = None,
) -> Story:
    """All six conditions, always in this order; what is not said is False with the reason of the state."""
    verdicts = (
        running,
        recovering or Verdict(type="Recovering", status=False, reason=state, message=""),
        checkpoint,
        suspended or Verdict(type="Suspended", status=False, reason="NotSuspended", message=""),
        complete or Verdict(type="Complete", status=False, reason="NotFinished", message=""),
        failed or Verdict(type="Failed", status=False, reason="NotFailed", message=""),
    )
    loud = next((v for v in (failed, complete, suspended, recovering) if v and v.status), running)
    return Story(state=state, verdicts=verdicts, message=loud.message)


def decide_checkpoint(observed: Observed, decisions: Sequence[Decision], now: float) -> Verdict:
    """Is what has been computed safe? Unknown until the first commit."""
    seen = observed.seen
    if any(isinstance(d, Raise) and d.uncommitted for d in decisions):
        message = next(d.message for d in decisions if isinstance(d, Raise) and d.uncommitted)
        return Verdict(
            type="CheckpointHealthy", status=False, reason="LeftWithoutCommit", message=message
        )
    if seen is not None and seen.storage_error is not None:
        error = seen.storage_error
        return Verdict(
            type="CheckpointHealthy",
            status=False,
            reason=error.kind or "StoreError",
            message=error.message,
        )
    newest = _checkpoint(observed, now)
    if standing := _still_without_commit(observed, newest):
        return standing
    if newest is None:
        return Verdict(
            type="CheckpointHealthy",
            status=None,
            reason="NoCheckpointYet",
            message="nothing committed yet",
        )
    if observed.running and (late := _late(observed, newest)):
        return Verdict(
            type="CheckpointHealthy", status=False, reason="CheckpointLate", message=late
        )
    return Verdict(
        type="CheckpointHealthy",
        status=True,
        reason="CheckpointCommitted",
        message="the newest checkpoint stands in the run log",
    )


def _still_without_commit(observed: Observed, newest: CheckpointStatus | None) -> Verdict | None:
    old = find_condition(observed.job.status, "CheckpointHealthy")
    before = observed.job.status.checkpoint
    if old is None or old.reason != "LeftWithoutCommit":
        return None
    if newest is not None and (before is None or before.step != newest.step):
        return None
    return Verdict(type=old.type, status=False, reason=old.reason, message=old.message)


def _late(observed: Observed, newest: CheckpointStatus) -> str:
    spec = observed.job.spec
    every = spec.checkpoint.save_seconds if spec else 0
    if not every or newest.age_seconds <= STALE_INTERVALS * every + STALE_GRACE_SECONDS:
        return ""
    return f"no commit for more than {STALE_INTERVALS} intervals of {every} s: last at step {newest.step}"


def build_events(
    old: JobStatus, new: JobStatus, decisions: Sequence[Decision]
) -> tuple[Happening, ...]:
    """One for each condition that has become true or changed its reason, and one for each interruption.

    What two of them would say in the same words is said once, by the one that says more.
    """
    found = [h for c in new.conditions if (h := _announced(find_condition(old, c.type), c))]
    found = [h for k, h in enumerate(found) if h.message not in {o.message for o in found[k + 1 :]}]
    told = {h.message for h in found}
    found += _of_recoveries(old, new)
    known = {(i.id, i.slot) for i in old.incidents if i.attempt is not None}
    for decision in decisions:
        match decision:
            case Leave(hold=False) if (decision.incident, decision.slot) not in known:
                found += [] if describe_leave(decision) in told else [_of_leave(decision)]
            case Raise(counted=True):
                found.append(_of_raise(decision))
            case _:
                pass
    return tuple(found)


def _announced(old: Condition | None, new: Condition) -> Happening | None:
    if old is not None and (old.status, old.reason) == (new.status, new.reason):
        return None
    quiet = new.status != "True" and new.type != "CheckpointHealthy" and new.type != "Running"
    if quiet or new.status == "Unknown" or not new.message:
        return None
    bad = new.type in WARNINGS or (new.type == "CheckpointHealthy" and new.status == "False")
    bad = bad and new.reason not in WISHES
    return Happening(
        reason=new.reason,
        message=new.message,
        warning=bad,
        stamp=f"{new.type}-{new.last_transition_time}",
    )


def _of_recoveries(old: JobStatus, new: JobStatus) -> list[Happening]:
    """One for each interruption that is over since; an end of the job is no recovery."""
    known = {entries[0].id for entries in telling.list_over(old.incidents)}
    over = [] if new.state in OVER else telling.list_over(new.incidents)
    return [
        Happening(
            reason="Recovered",
            message=telling.tell(entries),
            incident=entries[0].id,
            stamp=entries[0].id,
        )
        for entries in over
        if entries[0].id not in known and entries[0].cause not in WISHES
    ]


def describe_leave(decision: Leave) -> str:
    return f"slot {decision.slot} is asked to save and leave: {decision.message} [{_tag(decision)}]"


def _tag(decision: Leave | Raise) -> str:
    """The incident, and the quarantine's where that was opened under another id."""
    if decision.verdict in ("", decision.incident):
        return decision.incident
    return f"{decision.incident}, quarantine {decision.verdict}"


def _of_leave(decision: Leave) -> Happening:
    return Happening(
        reason=decision.cause,
        message=describe_leave(decision),
        warning=decision.cause not in WISHES,
        incident=decision.incident,
        stamp=f"{decision.slot}-{decision.incident}",
    )


def _of_raise(decision: Raise) -> Happening:
    return Happening(
        reason=decision.cause,
        message=f"slot {decision.slot} goes on as attempt {decision.to}: {decision.message} "
        f"[{_tag(decision)}]",
        warning=True,
        incident=decision.incident,
        stamp=f"{decision.slot}-{decision.to}",
    )

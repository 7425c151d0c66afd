"""The ends of a job: finished, suspended, unreadable spec. Nothing here starts a pod."""

from collections.abc import Sequence
from dataclasses import replace

from everstep_contract.levels import Stop
from everstep_operator.jobs import attempts, conditions, failures, membership
from everstep_operator.jobs.actions import Action, DeleteJob, DeletePod, Plan
from everstep_operator.jobs.conditions import ConditionDraft, Story
from everstep_operator.jobs.failures import End
from everstep_operator.jobs.membership import Raise
from everstep_operator.jobs.observed import Observed, Pod
from everstep_operator.jobs.stamps import to_seconds, to_stamp
from everstep_operator.jobs.wanted import build_wanted
from everstep_operator.model_status import SlotStatus

BUSY_SECONDS = 1.0
RETRY_SECONDS = 30.0
NAMED = 3
"""How many pods a message names."""


def plan_end(observed: Observed, end: End, now: float) -> Plan:
    """Record that the job is over. From the next pass on, running workers are told to finish."""
    records = membership.build_records(observed)
    status = conditions.build_status(observed, records, (), _end_story(observed, end, now), now)
    return Plan(
        status=status,
        counts=True,
        events=conditions.build_events(observed.job.status, status, ()),
    )


def _end_story(observed: Observed, end: End, now: float) -> Story:
    word = "Complete" if end.complete else "Failed"
    over = ConditionDraft(type=word, status=True, reason=end.reason, message=end.message)
    return conditions.build_story(
        state=word,
        running=ConditionDraft(type="Running", status=False, reason=word, message=end.message),
        checkpoint=conditions.decide_checkpoint(observed, (), now),
        complete=over if end.complete else None,
        failed=None if end.complete else over,
    )


def plan_finished(observed: Observed, now: float) -> Plan:
    """Keep the pods for their logs. Those that still run are told to finish, and are deleted after
    the drain time.
    """
    job = observed.job
    done = conditions.find_condition(job.status, "Complete")
    complete = done is not None and done.status == "True"
    word = done if complete else conditions.find_condition(job.status, "Failed")
    assert word is not None
    ended_at = to_seconds(word.last_transition_time) or now
    records = membership.build_records(observed)
    story = _end_story(
        observed, End(complete=complete, reason=word.reason, message=word.message), now
    )
    living = [p for p in observed.pods if not p.over]
    actions, wake = _finish(observed, living, ended_at, now)
    return Plan(
        actions=actions,
        status=conditions.build_status(observed, records, (), story, now),
        wanted=build_wanted(observed, records, stop=Stop.FINISH) if living and job.spec else None,
        wake_after=wake,
    )


def _finish(
    observed: Observed, living: Sequence[Pod], ended_at: float, now: float
) -> tuple[tuple[Action, ...], float | None]:
    spec = observed.job.spec
    ttl = spec.ttl_seconds_after_finished if spec else None
    if ttl is not None and now - ended_at >= ttl:
        text = f"finished {ttl} s ago (ttlSecondsAfterFinished)"
        return (DeleteJob(reason="Expired", message=text),), RETRY_SECONDS
    left = None if ttl is None else ended_at + ttl - now
    drain = spec.recovery.drain_timeout_seconds if spec else 0
    if not living:
        return (), left
    if min(now - ended_at, observed.over_for) < drain:
        # A container that does not run has nothing to save, and the kubelet would restart it again
        # and again.
        idle = [p for p in living if p.running_since is None]
        return _delete(idle, "JobFinished", "the job is over, and nothing runs here"), BUSY_SECONDS
    text = f"the job is over and the pod still runs {drain} s later"
    return _delete(living, "JobFinished", text), left


def _delete(pods: Sequence[Pod], reason: str, message: str) -> tuple[Action, ...]:
    return tuple(
        DeletePod(name=p.name, uid=p.uid, slot=p.slot, reason=reason, message=message)
        for p in pods
        if not p.deleting
    )


def plan_suspend(observed: Observed, now: float) -> Plan:
    """A stop takes precedence over membership: the job saves at its position, then the pods'
    attempts end, and then the pods are deleted.
    """
    job = observed.job
    records = attempts.note_pods(observed, membership.build_records(observed), (), now)
    held = [r for r in records if r.pod_uid is not None]
    since = to_seconds(job.status.stopping_since)
    if held and may_end(observed, since, now):
        raises = build_raises(observed, held, "Suspended", "suspended")
        plan = attempts.plan_count(observed, records, raises, now)
        return _with_story(plan, observed, _suspend_story(observed, now, over=False), since, now)
    over = all(p.over or _is_left_behind(observed, p, now) for p in observed.pods)
    if over:
        records = [r.model_copy(update={"incident": None}) if r.incident else r for r in records]
    story = _suspend_story(observed, now, over=over)
    status = conditions.build_status(observed, records, (), story, now)
    plan = Plan(
        actions=attempts.plan_former(observed, records),
        status=status,
        wanted=build_wanted(observed, records, stop=Stop.SUSPEND) if observed.pods else None,
        wake_after=BUSY_SECONDS if observed.pods else None,
    )
    return _with_story(plan, observed, story, since, now)


def _is_left_behind(observed: Observed, pod: Pod, now: float) -> bool:
    """Whether the pod's grace period is over, and its node is lost, so that no kubelet can end it.
    The pod's attempt is over, so whatever still runs there is fenced. No other pod can use that
    node's GPUs either.
    """
    node = observed.nodes.get(pod.node)
    lost = node is None or node.not_ready_for is not None
    return lost and observed.is_past_grace(pod, now)


def may_end(observed: Observed, since: float | None, now: float) -> bool:
    """Whether the pods may end: the state is saved, there is none, or the time to save is over."""
    spec, seen = observed.job.spec, observed.seen
    living = [p for p in observed.pods if not p.over and p.running_since is not None]
    if not living or (seen is not None and seen.stopped is not None):
        return True
    if not failures.may_train(observed, living):
        return True
    drain = spec.recovery.drain_timeout_seconds if spec else 0
    # As for a drain: the clock of the leader that began to stop the job may be behind.
    return since is not None and min(now - since, observed.stopping_for) > drain


def build_raises(
    observed: Observed, records: Sequence[SlotStatus], cause: str, message: str
) -> list[Raise]:
    """The next attempt for each slot; these attempts do not count as failures."""
    return [
        Raise(
            slot=r.slot,
            to=max(r.attempt, observed.newest_attempt(r.slot)) + 1,
            cause=cause,
            message=message,
            incident="",
        )
        for r in records
    ]


def _suspend_story(observed: Observed, now: float, *, over: bool) -> Story:
    checkpoint = observed.job.status.checkpoint
    safe = (
        f"the newest checkpoint is of step {checkpoint.step}" if checkpoint else "nothing was saved"
    )
    text = f"suspended by spec.suspend; {safe}" if over else "saving, then the pods end"
    behind = [p for p in observed.pods if not p.over] if over else []
    if behind:
        named = ", ".join(f"{p.name} on {p.node}" for p in behind[:NAMED])
        text += (
            f"; left on lost nodes until these come back or are deleted: {len(behind)} ({named})"
        )
    reason = "Suspended" if over else "Suspending"
    return conditions.build_story(
        state=reason,
        running=ConditionDraft(type="Running", status=False, reason=reason, message=text),
        checkpoint=conditions.decide_checkpoint(observed, (), now),
        suspended=ConditionDraft(type="Suspended", status=over, reason=reason, message=text),
    )


def _with_story(
    plan: Plan, observed: Observed, story: Story, since: float | None, now: float
) -> Plan:
    old = observed.job.status
    born = observed.job.created_at if old.state is None else now
    stamp = old.stopping_since if since is not None else to_stamp(born or now)
    status = conditions.with_story(plan.status, observed.job, story, now)
    status = status.model_copy(update={"stopping_since": stamp, "gang": None})
    events = conditions.build_events(old, status, ())
    return replace(plan, status=status, events=events)


def plan_unreadable(observed: Observed, reason: str, message: str, now: float) -> Plan:
    """Report a spec that cannot take effect. Nothing else changes: running pods continue."""
    records = list(observed.job.status.slots)
    verdict = ConditionDraft(type="Running", status=False, reason=reason, message=message)
    story = conditions.build_story(
        state="Invalid",
        running=verdict,
        checkpoint=conditions.decide_checkpoint(observed, (), now),
    )
    status = conditions.build_status(observed, records, (), story, now)
    return Plan(status=status, events=conditions.build_events(observed.job.status, status, ()))

"""A gang that cannot be completed: its pods hold nodes without training.

After `gangSeconds` the job saves its workers' state and gives all pods back. They are created again
after a pause that doubles with each try and differs from job to job. Of two jobs that block each
other, the younger gives its pods back first.
"""

import hashlib
from dataclasses import dataclass, replace

from everstep_contract.levels import Stop
from everstep_operator.jobs import attempts, conditions, ending, failures, membership, waiting
from everstep_operator.jobs.actions import Plan
from everstep_operator.jobs.conditions import ConditionDraft, Story
from everstep_operator.jobs.observed import Observed, Pod
from everstep_operator.jobs.stamps import to_seconds, to_stamp
from everstep_operator.jobs.wanted import build_wanted
from everstep_operator.model_status import GangStatus

PAUSE_SECONDS = 30.0
LONGEST_PAUSE_SECONDS = 600.0
REASON = "GangIncomplete"
OUTLOOK = "; Everstep deletes them"
"""Begins the part of the message that changes with each try."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveBack:
    message: str


def decide_gang(observed: Observed, now: float) -> GiveBack | None:
    """Decide whether the pods are to be given back now; None: they stay."""
    spec = observed.job.spec
    assert spec is not None
    held, wanted = list_held(observed), spec.workers.least
    if observed.running or not is_short(observed) or not _lacks_room(observed, now):
        return None
    if observed.seen is not None and observed.seen.storage_error is not None:
        return None
    since, limit = waiting.find_since(observed), spec.recovery.gang_seconds
    if since is None or min(now - since, observed.short_for) < limit:
        return None
    reason, words = waiting.describe_wait(observed, membership.build_records(observed), now)
    text = (
        f"only {len(held)} of the {wanted} pods that the job needs (workers.minReplicas; default: replicas) have found "
        f"a node within {limit} s (recovery.gangSeconds; {reason}: {words})"
    )
    return GiveBack(message=text)


def is_short(observed: Observed) -> bool:
    """Whether the job holds nodes, and for fewer pods than it needs."""
    spec = observed.job.spec
    return spec is not None and 0 < len(list_held(observed)) < spec.workers.least


def list_held(observed: Observed) -> list[Pod]:
    """Pods that hold a node, so that other jobs cannot use it."""
    return [p for p in observed.pods if p.node and not p.over and not p.deleting]


def _lacks_room(observed: Observed, now: float) -> bool:
    """Whether the missing pods wait for a scheduler, a quota or a policy, not for an image or a
    script.
    """
    current = {r.slot: r.attempt for r in observed.job.status.slots}
    waits = any(not p.node and p.attempt == current.get(p.slot) for p in observed.pods)
    return waits or waiting.is_held_back(observed, now)


def is_giving_back(observed: Observed, now: float) -> bool:
    """Whether the job is between the decision to give its pods back and the next try. No pause is
    longer than LONGEST_PAUSE_SECONDS twice; if it seems so, the clock was set back.
    """
    gang = observed.job.status.gang
    left = (to_seconds(gang.retry_at) or 0.0) - now if gang is not None else 0.0
    return 0 < left <= 2 * LONGEST_PAUSE_SECONDS and not observed.running


def plan_first(observed: Observed, decided: GiveBack, now: float) -> Plan:
    """Write the decision before acting on it, so that a restarted operator continues to give the
    pods back.
    """
    tries = (observed.job.status.gang.tries if observed.job.status.gang else 0) + 1
    retry = now + build_pause(observed.job.uid, tries)
    gang = GangStatus(tries=tries, since=to_stamp(now), retry_at=to_stamp(retry))
    story = _story(observed, gang, decided.message, now)
    records = membership.build_records(observed)
    status = conditions.build_status(observed, records, (), story, now)
    status = status.model_copy(update={"gang": gang})
    events = conditions.build_events(observed.job.status, status, ())
    return Plan(status=status, counts=True, events=events)


def build_pause(uid: str, tries: int) -> float:
    """Seconds until the next try. They double with each try; up to as much again is added, a share
    that is fixed for one try of one job and differs between jobs.
    """
    base: float = min(PAUSE_SECONDS * 2 ** (min(tries, 20) - 1), LONGEST_PAUSE_SECONDS)
    spread = int.from_bytes(hashlib.sha256(f"{uid}/{tries}".encode()).digest()[:4], "big") / 2**32
    return base * (1 + spread)


def plan_giving_back(observed: Observed, now: float) -> Plan:
    """Save the state if there is any, then end the attempts, then delete their pods."""
    job, gang = observed.job, observed.job.status.gang
    assert gang is not None
    records = attempts.note_pods(observed, membership.build_records(observed), (), now)
    held = [r for r in records if r.pod_uid is not None]
    running = conditions.find_condition(job.status, "Running")
    story = _story(observed, gang, _said_before(running.message if running else ""), now)
    # Without a time limit: state that cannot be saved is never dropped to give pods back.
    if held and ending.may_end(observed, None, now):
        raises = ending.build_raises(observed, held, REASON, "given back")
        plan = attempts.plan_count(observed, records, raises, now)
        return replace(plan, status=conditions.with_story(plan.status, job, story, now), events=())
    status = conditions.build_status(observed, records, (), story, now)
    due = to_seconds(gang.retry_at) or now
    deadline = failures.find_deadline(job, now)
    left = (due if deadline is None else min(due, deadline)) - now
    return Plan(
        actions=attempts.plan_former(observed, records),
        status=status,
        wanted=build_wanted(observed, records, stop=Stop.SUSPEND) if observed.pods else None,
        wake_after=ending.BUSY_SECONDS if observed.pods else max(0.1, left),
    )


def _said_before(message: str) -> str:
    """The reason, without the outlook that `_story` adds again."""
    return message.partition(OUTLOOK)[0]


def _story(observed: Observed, gang: GangStatus, why: str, now: float) -> Story:
    text = (
        f"{why}{OUTLOOK}, so that other jobs can use the nodes, and creates all again at "
        f"{gang.retry_at} (try {gang.tries + 1})"
    )
    return conditions.build_story(
        state="Pending",
        running=ConditionDraft(type="Running", status=False, reason=REASON, message=text),
        checkpoint=conditions.decide_checkpoint(observed, (), now),
    )

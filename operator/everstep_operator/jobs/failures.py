"""What an ended container, an exit report or the job's own report means for the job.

Invariant: `done` takes precedence over everything, and a final end never becomes a restart. A
container that the kubelet restarts by itself (restartPolicy OnFailure) is ignored here unless
its agent has never answered.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from everstep_contract.report import FOR_GOOD, OF_THE_POD, Cause, ExitReport
from everstep_operator.jobs import budgets
from everstep_operator.jobs.observed import Ended, Job, Observed, Pod
from everstep_operator.jobs.stamps import to_seconds

WRITE_THIS = (
    "write `command: [everstep, run, train.py]` in the container named `trainer` and install "
    "Everstep's wheel in its image (examples/README.md, section The image)"
)
TRIES_WITHOUT_A_CALL = 4
CALL_SECONDS = 30.0
"""How long the other running pods are asked before a container that does not start fails the job.
"""
USUAL_WAITS = frozenset({"", "ContainerCreating", "PodInitializing"})
"""Reasons why a container does not run yet that are no errors."""
NOT_STARTED = frozenset({126, 127, 128})
"""Exit codes of shells and runtimes for a command that cannot be started."""
OF_THE_NODE = ("nvidia", "nvml", "cdi device", "prestart hook", "amdgpu")
"""Words of a runtime that could not give a container its devices: the node's driver is at fault, not the command."""
OF_THE_COMMAND = re.compile(r"container (?:process|init): exec: ")
"""So runc begins about a command that it cannot start, whatever is in the command's path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The job is over: `complete` or failed, with the condition's text."""

    complete: bool
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Replace:
    """The slot needs its next attempt."""

    cause: str
    message: str


def decide_end(observed: Observed, now: float) -> End | None:
    """How the job ends; None: it is not over. The checks go from certain success to certain
    failure.
    """
    if end := _done(observed):
        return end
    if end := _failed_by_job_report(observed):
        return end
    for pod in observed.pods:
        if end := _failed_by_exit_report(observed, pod):
            return end
    if end := _over_budget(observed, now):
        return end
    if end := _past_deadline(observed, now):
        return end
    for pod in observed.pods:
        if end := decide_never_called(observed, pod, now):
            return end
    return _fenced(observed)


def _done(observed: Observed) -> End | None:
    step = find_final_step(observed)
    if step is None:
        return None
    return End(
        complete=True, reason="Done", message=f"the script has reached its end at step {step}"
    )


def find_final_step(observed: Observed) -> int | None:
    """The step at which the script has reached its end, as the pods or the coordinator report it; None: it has not.
    The highest step counts, because the coordinator may have been heard last before the end.
    """
    seen = observed.seen
    reports = [r for p in observed.pods if (r := report_of(p)) is not None]
    if not any(r.done or r.cause is Cause.DONE for r in reports) and not (seen and seen.done):
        return None
    return max([r.step for r in reports] + ([seen.step] if seen else []))


def _failed_by_job_report(observed: Observed) -> End | None:
    seen = observed.seen
    if seen is None or seen.failure is None:
        return None
    failure = seen.failure
    where = _where(failure.rank, failure.step)
    return End(complete=False, reason=failure.cause or "Failed", message=failure.message + where)


def _failed_by_exit_report(observed: Observed, pod: Pod) -> End | None:
    found = report_of(pod)
    if found is None or found.cause not in FOR_GOOD - OF_THE_POD - {Cause.DONE}:
        return None
    if pod.misconfigured and (has_answered(observed) or _may_still_call(observed)):
        return None  # the same settings work in other pods, or may: see `decide_replacement`
    if is_own_fault(observed, pod):
        return None
    message = (found.message or found.cause.value) + _where(found.rank, found.step)
    return End(complete=False, reason=found.cause.value, message=message)


def is_own_fault(observed: Observed, pod: Pod) -> bool:
    """Whether the script has failed in this pod alone: the job has trained with it, and another pod has run since
    before this one was made. So it is the pod's node or network that is at fault. A pod of a former attempt
    says nothing about the script: the present ones do.
    """
    if not (pod.failed_alone and observed.job.status.epoch):
        return False
    current = observed.current_pods
    since = [p.running_since for p in current if p.uid != pod.uid and p.running_since is not None]
    return pod not in current or any(began <= pod.created_at for began in since)


def report_of(pod: Pod) -> ExitReport | None:
    """The report of a container that has ended and will not be restarted."""
    return pod.ended.report if pod.ended else None


def _where(rank: int | None, step: int | None) -> str:
    parts = [f"rank {rank}"] if rank is not None else []
    parts += [f"step {step}"] if step else []
    return f" ({', '.join(parts)})" if parts else ""


def _over_budget(observed: Observed, now: float) -> End | None:
    spec = observed.job.spec
    if spec is None:
        return None
    limits = spec.recovery.restart_budgets
    message = budgets.describe_overrun(observed.job.status.restarts, limits, now)
    return End(complete=False, reason="RestartBudgetExceeded", message=message) if message else None


def _past_deadline(observed: Observed, now: float) -> End | None:
    spec, deadline = observed.job.spec, find_deadline(observed.job, now)
    if spec is None or deadline is None or now <= deadline:
        return None
    return End(
        complete=False,
        reason="DeadlineExceeded",
        message=f"not finished {spec.active_deadline_seconds} s after its creation, time spent suspended not counted "
        "(activeDeadlineSeconds)",
    )


def find_deadline(job: Job, now: float) -> float | None:
    """When activeDeadlineSeconds is over if the job is not suspended until then; None: never."""
    limit = job.spec.active_deadline_seconds if job.spec else None
    return None if limit is None else job.created_at + suspended_seconds(job, now) + limit


def suspended_seconds(job: Job, now: float) -> float:
    """Seconds that the job has spent suspended so far, including the present suspension."""
    since = to_seconds(job.status.stopping_since) or _suspended_from_birth(job)
    return (job.status.suspended_seconds or 0) + (max(0.0, now - since) if since else 0.0)


def _suspended_from_birth(job: Job) -> float | None:
    """The creation time of a job that was created suspended and that no pass has seen yet;
    otherwise None.
    """
    asleep = job.spec is not None and job.spec.suspend and job.status.state is None
    return job.created_at if asleep else None


def decide_never_called(observed: Observed, pod: Pod, now: float) -> End | None:
    """Fail the job if the agent of a container has never answered. This applies only before the
    job's first epoch, and only if no other agent of the job has answered.

    Once one has answered, image and command are known to work. Then the node or the network is at
    fault, and the pod is replaced on another node (`starts`).
    """
    spec = observed.job.spec
    if spec is None or has_answered(observed) or _may_still_call(observed):
        return None
    if pod.uid in observed.callers or report_of(pod) or (pod.last_ended and pod.last_ended.report):
        return None
    if why := _why_not_started(pod):
        return End(
            complete=False,
            reason="AgentNeverCalled",
            message=f"pod {pod.name}: {why}; {WRITE_THIS}",
        )
    limit = spec.recovery.startup_seconds
    asked = observed.asked_for.get(pod.uid, 0.0)
    if pod.running_since is None or min(now - pod.running_since, asked) <= limit:
        return None
    return End(
        complete=False,
        reason="AgentNeverCalled",
        message=f"pod {pod.name} runs, but no agent has answered the operator at {pod.ip}:7070 within {limit} s "
        f"(recovery.startupSeconds), so the job fails. If the command is not everstep: {WRITE_THIS}. If it is: let "
        "the operator reach port 7070 (NetworkPolicy)",
    )


def has_answered(observed: Observed) -> bool:
    """Whether an agent of the job has ever answered, as far as is known: then image, command and settings
    work.
    """
    return bool(observed.job.status.epoch or observed.callers) or observed.seen is not None


def _may_still_call(observed: Observed) -> bool:
    """Whether a pod runs that this operator has not asked for long (an operator that has just
    started knows no agent yet), or whose container is still being created.
    """
    spec, asked = observed.job.spec, observed.asked_for
    limit = spec.recovery.startup_seconds if spec else CALL_SECONDS
    living = [p for p in observed.pods if not (p.over or p.deleting)]
    up = [p for p in living if p.running_since is not None]
    coming = [p for p in living if _is_first_start(p)]
    return any(asked.get(p.uid, 0.0) < min(CALL_SECONDS, limit) for p in up) or any(
        observed.starting_for.get(p.uid, 0.0) < limit for p in coming
    )


def may_train(observed: Observed, pods: Iterable[Pod]) -> bool:
    """Whether one of these running pods may be a member of an epoch. The first epoch may have begun
    while no operator ran: only an agent can tell, and this operator may not have asked it for long.
    """
    if observed.job.status.epoch or (observed.seen and observed.seen.epoch):
        return True
    asked = observed.asked_for
    return observed.seen is None and any(asked.get(p.uid, 0.0) < CALL_SECONDS for p in pods)


def _is_first_start(pod: Pod) -> bool:
    """Whether the pod has a node, and its container has not been started yet: the image may still be
    on its way.
    """
    begun = pod.running_since is not None or pod.ended or pod.last_ended
    return bool(pod.node) and not begun and pod.waiting in USUAL_WAITS


def _why_not_started(pod: Pod) -> str:
    ended = pod.ended or pod.last_ended
    if ended is None or ended.report is not None or _is_of_the_node(ended):
        return ""
    if pod.over and ended.exit_code == 0:
        return "the container has ended with status 0 and no agent has ever answered"
    if ended.exit_code in NOT_STARTED or ended.reason in ("StartError", "ContainerCannotRun"):
        return f"the command could not be started: {_words(ended)}"
    if pod.restarts >= TRIES_WITHOUT_A_CALL:
        return (
            f"the container has ended {pod.restarts} times before its agent answered: "
            f"{_words(ended)}"
        )
    return ""


def _is_of_the_node(ended: Ended) -> bool:
    """Whether another node may start the container: `starts` tries that after startupSeconds."""
    words = ended.message.lower()
    if ended.exit_code != 128 or OF_THE_COMMAND.search(words):
        return False
    return any(word in words for word in OF_THE_NODE)


def _words(ended: Ended) -> str:
    return f"{ended.reason or 'exit'} {ended.exit_code} {ended.message}".strip()[:1000]


def _fenced(observed: Observed) -> End | None:
    """Fail the job if all its pods are fenced: another job has taken over the run. A single pod
    that is fenced while the job runs is only replaced. A pod of a former attempt, whose node was
    lost and is back, is fenced by its own job.
    """
    pods = observed.current_pods
    if observed.running or not pods:
        return None
    reports = [report_of(p) for p in pods]
    if not all(map(is_fenced, pods)):
        return None
    text = next(
        (r.message for r in reports if r is not None and r.message), "another job writes this run"
    )
    return End(complete=False, reason="Fenced", message=text)


def is_fenced(pod: Pod) -> bool:
    found = report_of(pod)
    return found is not None and found.cause is Cause.FENCED


def decide_replacement(observed: Observed, pod: Pod) -> Replace | None:
    """Replace a pod in which nothing runs any more, or which can never end, although the job is not
    over.
    """
    found = report_of(pod)
    if stuck := _why_stuck(observed, pod):
        return Replace(cause="ProcessStuck", message=f"pod {pod.name}: {stuck}")
    if found is not None and found.cause is Cause.FENCED:
        return Replace(cause="PodFenced", message=f"pod {pod.name}: {found.message or 'fenced'}")
    if not pod.over:
        return None
    if found is not None and (pod.misconfigured or is_own_fault(observed, pod)):
        text = (
            f"pod {pod.name} on node {pod.node} cannot start, and other pods of the job have, so it is replaced, on "
            f"another node if one has room: {found.message}"
        )
        return Replace(cause="PodNotStarted", message=text)
    if found is not None and found.cause is Cause.LEFT:
        left = f"has {found.message or 'left'}"
        if pod.deleting:
            text = f"pod {pod.name} is being deleted, and {left}"
            return Replace(cause="PodDeleted", message=text)
        return Replace(cause="PodLeft", message=f"pod {pod.name} {left}{_why_ended(pod)}")
    if found is not None and found.cause is Cause.STOPPED:
        text = f"pod {pod.name} had stopped for a suspension that has been cancelled"
        return Replace(cause="Suspended", message=text)
    if found is not None:
        return Replace(
            cause="ContainerEnded", message=f"pod {pod.name}: {found.cause.value}: {found.message}"
        )
    if pod.phase == "Failed":
        why = f"{pod.reason} {pod.message}".strip() or (
            _words(pod.ended) if pod.ended else "failed"
        )
        cause = "PodRefusedByNode" if pod.refused_by_node else "PodEvicted"
        return Replace(cause=cause, message=f"pod {pod.name}: {why}")
    return Replace(
        cause="ContainerEnded", message=f"pod {pod.name} has ended without an exit report"
    )


def _why_ended(pod: Pod) -> str:
    """Why the pod was ended, if its status says so: a kubelet that shuts its node down does."""
    words = ": ".join(word for word in (pod.reason, pod.message) if word)
    return f" ({words})" if words else ""


def _why_stuck(observed: Observed, pod: Pod) -> str:
    """Why the pod can never end; empty if it can. A process that survives SIGKILL keeps its
    container from ending, so the job's report counts as well as the exit report. Neither proves
    that the process is dead: the other pods continue without it only once the slot has a new
    attempt.
    """
    found = report_of(pod)
    if found is not None and found.cause is Cause.PROCESS_STUCK:
        return found.message
    told = observed.seen.stuck if observed.seen is not None else ()
    return next((s.message for s in told if (s.slot, s.attempt) == (pod.slot, pod.attempt)), "")

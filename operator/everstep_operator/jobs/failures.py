"""What an ended container, an exit report or the job's own word means for the job.

Invariant: `done` outranks everything, and an end for good never becomes a restart. A container that
the kubelet restarts by itself (restartPolicy OnFailure) is none of our business unless its agent
has never called.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from everstep_contract.report import FOR_GOOD, Cause, ExitReport
from everstep_operator.jobs.observed import Ended, Job, Observed, Pod
from everstep_operator.jobs.stamps import to_seconds
from everstep_operator.model import RestartBudgets

WRITE_THIS = (
    "write `command: [everstep, run, train.py]` in the container named `trainer` and install "
    "Everstep in its image (pip install 'everstep[runtime]')"
)
TRIES_WITHOUT_A_CALL = 4
NOT_STARTED = frozenset({126, 127, 128})
"""Exit codes of shells and runtimes for a command that cannot be started."""
OF_THE_POD = frozenset({Cause.LEFT, Cause.STOPPED, Cause.FENCED})
"""Ends of one pod, not of the job."""

BUDGETS: Mapping[str, frozenset[str]] = {
    "node": frozenset({"NodeLeaving", "NodeGone", "NodeLost"}),
    "pod": frozenset({"PodDeleted", "PodEvicted", "PodFenced", "PodLeft", "ContainerEnded"}),
    "worker": frozenset({"WorkerDied", "AgentError"}),
    "hang": frozenset({"WorkerHung"}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The job is over. `complete` or failed, with the words of the condition."""

    complete: bool
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Replace:
    """The slot needs its next attempt."""

    cause: str
    message: str


def decide_end(observed: Observed, now: float) -> End | None:
    """Whether the job is over: the ladder from certain success to certain failure."""
    if end := _done(observed):
        return end
    if end := _failed_by_its_own_word(observed):
        return end
    for pod in observed.pods:
        if end := _failed_by_report(pod):
            return end
    if end := _over_budget(observed):
        return end
    if end := _past_deadline(observed, now):
        return end
    for pod in observed.pods:
        if end := decide_never_called(observed, pod, now):
            return end
    return _fenced(observed)


def _done(observed: Observed) -> End | None:
    seen = observed.seen
    reports = [r for p in observed.pods if (r := report_of(p)) is not None]
    done = next((r for r in reports if r.done or r.cause is Cause.DONE), None)
    if done is None and not (seen and seen.done):
        return None
    step = max([r.step for r in reports] + ([seen.step] if seen else []))
    return End(
        complete=True, reason="Done", message=f"the script has reached its end at step {step}"
    )


def _failed_by_its_own_word(observed: Observed) -> End | None:
    seen = observed.seen
    if seen is None or seen.failure is None:
        return None
    failure = seen.failure
    where = _where(failure.rank, failure.step)
    return End(complete=False, reason=failure.cause or "Failed", message=failure.message + where)


def _failed_by_report(pod: Pod) -> End | None:
    found = report_of(pod)
    if found is None or found.cause not in FOR_GOOD - OF_THE_POD - {Cause.DONE}:
        return None
    message = (found.message or found.cause.value) + _where(found.rank, found.step)
    return End(complete=False, reason=found.cause.value, message=message)


def report_of(pod: Pod) -> ExitReport | None:
    """The report of a container that has ended and will not be started again."""
    return pod.ended.report if pod.ended else None


def _where(rank: int | None, step: int | None) -> str:
    parts = [f"rank {rank}"] if rank is not None else []
    parts += [f"step {step}"] if step else []
    return f" ({', '.join(parts)})" if parts else ""


def _over_budget(observed: Observed) -> End | None:
    spec, restarts = observed.job.spec, observed.job.status.restarts
    if spec is None or restarts is None:
        return None
    for budget, causes in BUDGETS.items():
        used = sum(restarts.by_cause.get(cause, 0) for cause in causes)
        allowed = budget_of(spec.recovery.restart_budgets, budget)
        if used > allowed:
            return End(
                complete=False,
                reason="RestartBudgetExceeded",
                message=f"{used} interruptions of the kind `{budget}` and "
                f"recovery.restartBudgets.{budget} allows {allowed}: "
                f"{', '.join(f'{c} {n}' for c, n in sorted(restarts.by_cause.items()) if c in causes)}",
            )
    return None


def budget_of(budgets: RestartBudgets, name: str) -> int:
    allowed: int = getattr(budgets, name)
    return allowed


def _past_deadline(observed: Observed, now: float) -> End | None:
    job = observed.job
    limit = job.spec.active_deadline_seconds if job.spec else None
    if limit is None or now - job.created_at - suspended_seconds(job, now) <= limit:
        return None
    return End(
        complete=False,
        reason="DeadlineExceeded",
        message=f"not finished {limit} s after its creation, time spent suspended not counted "
        "(activeDeadlineSeconds)",
    )


def suspended_seconds(job: Job, now: float) -> float:
    """So far, the present suspension too."""
    since = to_seconds(job.status.stopping_since) or _suspended_from_birth(job)
    return (job.status.suspended_seconds or 0) + (max(0.0, now - since) if since else 0.0)


def _suspended_from_birth(job: Job) -> float | None:
    """It was made so, and nobody has looked at it yet."""
    asleep = job.spec is not None and job.spec.suspend and job.status.observed_generation is None
    return job.created_at if asleep else None


def decide_never_called(observed: Observed, pod: Pod, now: float) -> End | None:
    """A container in which no agent of ours has ever spoken up; only before the job's first epoch.

    Later the image is known to be good, and silence means that something between us is broken.
    """
    spec = observed.job.spec
    if spec is None or observed.job.status.epoch or observed.seen is not None:
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
        message=f"pod {pod.name} runs, but no agent has answered at {pod.ip}:7070 within {limit} s "
        f"(recovery.startupSeconds); {WRITE_THIS}",
    )


def _why_not_started(pod: Pod) -> str:
    ended = pod.ended or pod.last_ended
    if ended is None or ended.report is not None:
        return ""
    if pod.over and ended.exit_code == 0:
        return "the container has ended with status 0 and no agent has ever called"
    if ended.exit_code in NOT_STARTED or ended.reason in ("StartError", "ContainerCannotRun"):
        return f"the command could not be started: {_words(ended)}"
    if pod.restarts >= TRIES_WITHOUT_A_CALL:
        return (
            f"the container has ended {pod.restarts} times before its agent called: {_words(ended)}"
        )
    return ""


def _words(ended: Ended) -> str:
    return f"{ended.reason or 'exit'} {ended.exit_code} {ended.message}".strip()[:1000]


def _fenced(observed: Observed) -> End | None:
    """Another job has taken the run over. A single pod that is fenced while the job runs is just replaced."""
    if observed.running or not observed.pods:
        return None
    reports = [report_of(p) for p in observed.pods]
    if not all(map(is_fenced, observed.pods)):
        return None
    text = next(
        (r.message for r in reports if r is not None and r.message), "another job writes this run"
    )
    return End(complete=False, reason="Fenced", message=text)


def is_fenced(pod: Pod) -> bool:
    found = report_of(pod)
    return found is not None and found.cause is Cause.FENCED


def decide_replacement(observed: Observed, pod: Pod) -> Replace | None:
    """A pod of which nothing runs any more, although the job is not over."""
    found = report_of(pod)
    if found is not None and found.cause is Cause.FENCED:
        return Replace(cause="PodFenced", message=f"pod {pod.name}: {found.message or 'fenced'}")
    if not pod.over:
        return None
    if found is not None and found.cause is Cause.STOPPED:
        text = f"pod {pod.name} had stopped for a suspension that was taken back"
        return Replace(cause="Suspended", message=text)
    if found is not None:
        return Replace(
            cause="ContainerEnded", message=f"pod {pod.name}: {found.cause.value} {found.message}"
        )
    if pod.phase == "Failed":
        why = f"{pod.reason} {pod.message}".strip() or (
            _words(pod.ended) if pod.ended else "failed"
        )
        return Replace(cause="PodEvicted", message=f"pod {pod.name}: {why}")
    return Replace(cause="ContainerEnded", message=f"pod {pod.name} has ended without a word")

"""Why a job does not run (yet): the first reason on the way from template to first step, in the
words of whoever knows.
"""

from collections.abc import Sequence

from everstep_operator.jobs import conditions
from everstep_operator.jobs.conditions import Story, Verdict
from everstep_operator.jobs.membership import Decision, Leave
from everstep_operator.jobs.observed import Observed, Pod
from everstep_operator.jobs.stamps import to_stamp
from everstep_operator.model_status import SlotStatus

REFUSED_SECONDS = 30.0
"""After which a pod that was not allowed (quota, policy) is tried again."""
SILENCE_SECONDS = 30.0
"""For which a job that ran is taken to run on though nobody answers us."""
USUAL_WAITS = frozenset({"", "ContainerCreating", "PodInitializing"})


def is_held_back(observed: Observed, now: float) -> bool:
    """Whether the API server's last refusal still stands."""
    refusal = observed.refusal
    if refusal is None or refusal.generation != observed.job.generation:
        return False
    return now - refusal.at < REFUSED_SECONDS * (10 if refusal.invalid else 1)


def build_job_story(
    observed: Observed, records: Sequence[SlotStatus], decisions: Sequence[Decision], now: float
) -> Story:
    running = decide_running(observed, records, now)
    leaving = [d for d in decisions if isinstance(d, Leave) and not d.hold]
    checkpoint = conditions.decide_checkpoint(observed, decisions, now)
    if running.status and not leaving:
        return conditions.build_story(state="Running", running=running, checkpoint=checkpoint)
    if running.status or _was_under_way(observed):
        recovering = _recovering(observed, leaving, running)
        return conditions.build_story(
            state="Recovering", running=running, checkpoint=checkpoint, recovering=recovering
        )
    state = "Pending" if running.reason in _BEFORE_START else "Starting"
    return conditions.build_story(state=state, running=running, checkpoint=checkpoint)


_BEFORE_START = frozenset({"CreatingPods", "Unschedulable", "TemplateInvalid", "PodRefused"})


def _was_under_way(observed: Observed) -> bool:
    """It ran until just now, or is still being recovered; a job that is resumed starts."""
    old = observed.job.status
    if not (old.epoch or (observed.seen and observed.seen.epoch)):
        return False
    found = conditions.find_condition(old, "Running")
    return (
        (found is not None and found.status != "False")
        or conditions.is_true(old, "Recovering")
        or any(i.open for i in old.incidents)
    )


def _recovering(observed: Observed, leaving: Sequence[Leave], running: Verdict) -> Verdict:
    if leaving:
        text = conditions.describe_leave(leaving[0])
        return Verdict(type="Recovering", status=True, reason=leaving[0].cause, message=text)
    open_ = [i for i in observed.job.status.incidents if i.open]
    if observed.seen:
        ids = {i.id for i in open_}
        for runtime in observed.seen.incidents:
            if runtime.open and runtime.id not in ids and not open_:
                text = f"{runtime.message}; {running.message}"
                return Verdict(type="Recovering", status=True, reason=runtime.cause, message=text)
    if open_:
        text = f"{open_[-1].message}; {running.message}"
        return Verdict(type="Recovering", status=True, reason=open_[-1].cause, message=text)
    return Verdict(type="Recovering", status=True, reason="Regrouping", message=running.message)


def decide_running(observed: Observed, records: Sequence[SlotStatus], now: float) -> Verdict:
    seen = observed.seen
    if observed.running and seen is not None:
        ranks = len(seen.members)
        text = f"epoch {seen.epoch} runs with {ranks} rank{'' if ranks == 1 else 's'}"
        return Verdict(type="Running", status=True, reason="Training", message=text)
    if unheard := _decide_unheard(observed, records):
        return unheard
    reason, message = describe_wait(observed, records, now)
    return Verdict(type="Running", status=False, reason=reason, message=message)


def _decide_unheard(observed: Observed, records: Sequence[SlotStatus]) -> Verdict | None:
    """All pods run and nobody answers us: our silence stops no training, so it changes little."""
    old = conditions.find_condition(observed.job.status, "Running")
    if observed.fresh or old is None or old.status == "False":
        return None
    pods = [observed.pod_of(r.slot, r.attempt) for r in records]
    up = [p for p in pods if p is not None and p.running_since is not None and not p.deleting]
    if not up or len(up) < len([p for p in pods if p is not None]):
        return None
    asked = max((observed.asked_for.get(p.uid, 0.0) for p in up), default=0.0)
    silent = observed.seen_age if observed.seen else asked
    if silent < SILENCE_SECONDS:
        return Verdict(
            type="Running",
            status=old.status == "True" or None,
            reason=old.reason,
            message=old.message,
        )
    text = f"no agent of the job answers the operator for {SILENCE_SECONDS:.0f} s; the pods run"
    return Verdict(type="Running", status=None, reason="NoWordFromJob", message=text)


def describe_wait(observed: Observed, records: Sequence[SlotStatus], now: float) -> tuple[str, str]:
    """Reason and message; the first that applies."""
    if is_held_back(observed, now) and observed.refusal is not None:
        invalid = observed.refusal.invalid
        return ("TemplateInvalid" if invalid else "PodRefused"), observed.refusal.message
    spec = observed.job.spec
    wanted = [r for r in records if spec is not None and r.slot < spec.workers.replicas]
    pods = [p for r in wanted if (p := observed.pod_of(r.slot, r.attempt)) is not None]
    for pod in pods:
        if found := _describe_node(observed, pod, now):
            return found
    for describe in (_describe_container, _describe_scheduling):
        for pod in pods:
            if found := describe(pod):
                return found
    if len(pods) < len(wanted):
        return "CreatingPods", f"{len(pods)} of {len(wanted)} pods exist"
    up = [p for p in pods if p.running_since is not None]
    if len(up) < len(pods):
        return "PodsStarting", f"{len(up)} of {len(pods)} containers run"
    return _describe_agents(observed, pods)


def _describe_node(observed: Observed, pod: Pod, now: float) -> tuple[str, str] | None:
    """A node that may come back is waited for: since when, until when, and who sets that."""
    node, spec = observed.nodes.get(pod.node), observed.job.spec
    if node is None or node.not_ready_for is None or spec is None or pod.over:
        return None
    since, limit = now - node.not_ready_for, spec.recovery.node_lost_seconds
    why = f" ({node.why.rstrip('.')})" if node.why else ""
    text = (
        f"slot {pod.slot} waits for node {pod.node}, which has not been Ready since "
        f"{to_stamp(round(since))}{why}; it is given up and the pod replaced at "
        f"{to_stamp(round(since + limit))} (recovery.nodeLostSeconds: {limit})"
    )
    return "NodeNotReady", text


def _describe_container(pod: Pod) -> tuple[str, str] | None:
    if pod.refused_by_node:
        text = f"pod {pod.name}: {pod.message or 'refused'}; the next attempt follows in seconds"
        return pod.reason or "PodRefusedByNode", text
    if pod.waiting in USUAL_WAITS:
        return None
    words = [pod.waiting_message]
    if pod.last_ended is not None:
        last = pod.last_ended
        said = last.report.message if last.report else last.message
        words.append(f"it ended with {last.exit_code} ({last.reason}): {said}")
    return pod.waiting, f"pod {pod.name}: {'; '.join(w for w in words if w)}"


def _describe_scheduling(pod: Pod) -> tuple[str, str] | None:
    return ("Unschedulable", f"pod {pod.name}: {pod.scheduling}") if pod.scheduling else None


def _describe_agents(observed: Observed, pods: Sequence[Pod]) -> tuple[str, str]:
    seen = observed.seen
    if seen is not None and seen.storage_error is not None:
        return seen.storage_error.kind or "StoreError", seen.storage_error.message
    called = [p for p in pods if p.uid in observed.callers]
    if len(called) < len(pods):
        return "WaitingForAgents", f"{len(called)} of {len(pods)} agents have called"
    return "Joining", "all agents have called; the workers start and join the epoch"

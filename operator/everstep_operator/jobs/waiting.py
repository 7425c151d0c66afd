"""Why a job does not run (yet): the first reason on the way from template to first step, in the
words of its source.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from everstep_operator.jobs import conditions, failures, starts, yields
from everstep_operator.jobs.conditions import ConditionDraft, Story
from everstep_operator.jobs.membership import Decision, Leave, Stay
from everstep_operator.jobs.observed import Observed, Pod, Refusal
from everstep_operator.jobs.stamps import to_seconds, to_stamp
from everstep_operator.model import JobSpec
from everstep_operator.model_status import SlotStatus

REFUSED_SECONDS = 30.0
"""After how long a pod that was not allowed (quota, policy) is tried again."""
FIRST_REFUSED_SECONDS = 2.0
"""The first such pause of a pod that replaces a lost one, which a quota counts until it has ended. Each
further pause is twice as long, up to `REFUSED_SECONDS`.
"""
SILENCE_SECONDS = 30.0
"""How long a job that ran counts as running although no agent answers."""
NOT_JUDGED = (
    "the operator creates pods once it has judged the nodes. If this stays, it cannot list the NodeQuarantines: see "
    "its log, and the Event QuarantinesUnreadable in the namespace default"
)


def is_held_back(observed: Observed, now: float) -> bool:
    """Whether the API server's last refusal still applies: no pod is created, except pods that replace
    lost ones if the refused pod replaced none.
    """
    return _still_applies(observed, observed.refusal, now)


def is_all_held_back(observed: Observed, now: float) -> bool:
    """Whether that refusal still applies to pods that replace lost ones, too."""
    refusal = observed.refusal
    return refusal is not None and refusal.urgent and is_held_back(observed, now)


def is_spare_held_back(observed: Observed, now: float) -> bool:
    return _still_applies(observed, observed.spare_refusal, now)


def _still_applies(observed: Observed, refusal: Refusal | None, now: float) -> bool:
    if refusal is None or refusal.generation != observed.job.generation:
        return False
    return abs(now - refusal.at) < refused_seconds(refusal)  # the clock may be set back


def refused_seconds(refusal: Refusal) -> float:
    """How long a refusal applies. That of an invalid template applies longer, because only an edit
    fixes it.
    """
    if refusal.invalid:
        return REFUSED_SECONDS * 10
    if not refusal.urgent:
        return REFUSED_SECONDS
    return float(min(FIRST_REFUSED_SECONDS * 2 ** min(refusal.tries - 1, 10), REFUSED_SECONDS))


def find_retry(observed: Observed, now: float) -> float:
    """Seconds until refused pods are tried again; infinite: none was refused, or it is tried now."""
    refusal = observed.refusal
    if refusal is None or not is_held_back(observed, now):
        return math.inf
    return refusal.at + refused_seconds(refusal) - now


def find_since(observed: Observed) -> float | None:
    """Since when a job has waited for the rest of its gang. None: it does not wait, or a younger
    job holds nodes in vain and has to give them back first.
    """
    status, spec = observed.job.status, observed.job.spec
    running = conditions.find_condition(status, "Running")
    stopped = to_seconds(running.last_transition_time) if running else None
    if spec is None or running is None or running.status != "False" or stopped is None:
        return None
    found = [stopped]
    if status.gang is not None:
        found.append(to_seconds(status.gang.retry_at) or stopped)
    for rival in observed.rivals:
        if rival.holds:
            return None
        found.append(rival.gave_back_at or stopped)
    return max(found)


def build_job_story(
    observed: Observed, records: Sequence[SlotStatus], decisions: Sequence[Decision], now: float
) -> Story:
    running = decide_running(observed, records, now)
    leaving = [d for d in decisions if isinstance(d, Leave) and not (d.hold or d.spare)]
    checkpoint = conditions.decide_checkpoint(observed, decisions, now)
    if running.status and not leaving:
        return conditions.build_story(state="Running", running=running, checkpoint=checkpoint)
    if running.status or _was_under_way(observed):
        recovering = _recovering(observed, leaving, running)
        recovering = _with_turns(recovering, decisions)
        return conditions.build_story(
            state="Recovering", running=running, checkpoint=checkpoint, recovering=recovering
        )
    state = "Pending" if running.reason in _BEFORE_START else "Starting"
    return conditions.build_story(state=state, running=running, checkpoint=checkpoint)


_BEFORE_START = frozenset({"CreatingPods", "Unschedulable", "TemplateInvalid", "PodRefused"})


def _was_under_way(observed: Observed) -> bool:
    """Whether the job ran until just now, or is still being recovered; a job that was resumed
    counts as starting.
    """
    old = observed.job.status
    if not (old.epoch or (observed.seen and observed.seen.epoch)):
        return False
    found = conditions.find_condition(old, "Running")
    return (
        (found is not None and found.status != "False")
        or conditions.is_true(old, "Recovering")
        or any(i.open for i in old.incidents)
    )


def _recovering(
    observed: Observed, leaving: Sequence[Leave], running: ConditionDraft
) -> ConditionDraft:
    if leaving:
        text = conditions.describe_leave(leaving[0])
        return ConditionDraft(type="Recovering", status=True, reason=leaving[0].cause, message=text)
    open_ = [i for i in observed.job.status.incidents if i.open]
    if observed.seen:
        ids = {i.id for i in open_}
        for runtime in observed.seen.incidents:
            if runtime.open and runtime.id not in ids and not open_:
                text = f"{runtime.message}; {running.message}"
                return ConditionDraft(
                    type="Recovering", status=True, reason=runtime.cause, message=text
                )
    if open_:
        text = f"{open_[-1].message}; {running.message}"
        return ConditionDraft(type="Recovering", status=True, reason=open_[-1].cause, message=text)
    reason = "NoNodeReady" if observed.cut_off else "Regrouping"
    if running.status is None:  # it may still train
        reason = running.reason
    return ConditionDraft(type="Recovering", status=True, reason=reason, message=running.message)


def _with_turns(recovering: ConditionDraft, decisions: Sequence[Decision]) -> ConditionDraft:
    count = len({d.awaits_turn for d in decisions if isinstance(d, Stay) and d.awaits_turn})
    if not count:
        return recovering
    who = (
        "1 more node waits for its turn"
        if count == 1
        else f"{count} more nodes wait for their turn"
    )
    text = f"{who}, because a job leaves at most a tenth of its nodes at a time"
    return replace(recovering, message=f"{recovering.message}; {text}")


def decide_running(observed: Observed, records: Sequence[SlotStatus], now: float) -> ConditionDraft:
    seen = observed.seen
    if observed.running and seen is not None:
        ranks = len(seen.members)
        who = "1 rank trains" if ranks == 1 else f"{ranks} ranks train"
        text = f"{who} (membership epoch {seen.epoch}){_describe_shortage(observed, records)}"
        return ConditionDraft(type="Running", status=True, reason="Training", message=text)
    if unheard := _decide_unheard(observed, records):
        return unheard
    reason, message = describe_wait(observed, records, now)
    return ConditionDraft(type="Running", status=False, reason=reason, message=message)


def _describe_shortage(observed: Observed, records: Sequence[SlotStatus]) -> str:
    """Why a job trains with fewer pods than it wants, if that may need a person: the API server
    refuses a pod, or no node or container takes it. Empty: nothing is missing, or it is on its way.
    """
    spec = observed.job.spec
    outside = [r for r in records if r.slot in observed.slots.training]
    outside = [r for r in outside if not observed.is_member(r.slot, r.attempt)]
    if spec is None or not outside:
        return ""
    pods = [observed.pod_of(r.slot, r.attempt) for r in outside]
    found = [_describe_container(p) or _describe_scheduling(p) for p in pods if p is not None]
    if observed.refusal is not None and None in pods:
        found.insert(0, ("", observed.refusal.message))
    words = next((words for _, words in filter(None, found)), "")
    if not words:
        return ""
    return f"; not training yet: {len(outside)} of {spec.workers.replicas} pods ({words})"


def _decide_unheard(observed: Observed, records: Sequence[SlotStatus]) -> ConditionDraft | None:
    """All pods that trained run and no agent answers: keep Running for 30 s, then
    Unknown/NoWordFromJob.
    """
    old = conditions.find_condition(observed.job.status, "Running")
    if observed.fresh or old is None or old.status == "False":
        return None
    pods = [p for r in records if (p := observed.pod_of(r.slot, r.attempt)) is not None]
    up = [p for p in pods if p.running_since is not None and not p.deleting]
    if not up or not _may_train_on(observed, pods, up):
        return None
    asked = max((observed.asked_for.get(p.uid, 0.0) for p in up), default=0.0)
    silent = observed.seen_age if observed.seen else asked
    if silent < SILENCE_SECONDS:
        return ConditionDraft(
            type="Running",
            status=old.status == "True" or None,
            reason=old.reason,
            message=old.message,
        )
    if observed.cut_off:
        text = _describe_cut_off(observed)
        return ConditionDraft(type="Running", status=None, reason="NoNodeReady", message=text)
    text = (
        f"no agent of the job has answered the operator for more than {SILENCE_SECONDS:.0f} s. Its pods run, so it may "
        "still train: look at their logs, and check that the operator can reach port 7070"
    )
    return ConditionDraft(type="Running", status=None, reason="NoWordFromJob", message=text)


def _may_train_on(observed: Observed, pods: Sequence[Pod], up: Sequence[Pod]) -> bool:
    """Whether all pods that trained last are up. Others may wait for a node meanwhile."""
    seen, world = observed.seen, observed.job.status.world
    if seen is not None and seen.running:
        members = {(m.slot, m.attempt) for m in seen.members}
        return members <= {(p.slot, p.attempt) for p in up}
    trained = world.ready if seen is None and world is not None else 0
    return len(up) >= (trained or len(pods))


def describe_wait(observed: Observed, records: Sequence[SlotStatus], now: float) -> tuple[str, str]:
    """Reason and message of the first cause that applies."""
    wanted = [r for r in records if r.slot in observed.slots.training]
    pods = [p for r in wanted if (p := observed.pod_of(r.slot, r.attempt)) is not None]
    if found := _describe_refusal(observed, now, missing=len(pods) < len(wanted)):
        return found
    if observed.cut_off:
        return "NoNodeReady", _describe_cut_off(observed)
    for pod in pods:
        if found := _describe_node(observed, pod, now):
            return found
    for describe in (_describe_container, _describe_scheduling):
        for pod in pods:
            if found := describe(pod):
                return found
    if len(pods) < len(wanted):
        text = f"{len(pods)} of {len(wanted)} pods exist"
        return "CreatingPods", text if observed.judged else f"{text}; {NOT_JUDGED}"
    up = [p for p in pods if p.running_since is not None]
    if len(up) < len(pods):
        return "PodsStarting", f"{len(up)} of {len(pods)} containers run"
    return _describe_agents(observed, pods)


def _describe_refusal(observed: Observed, now: float, *, missing: bool) -> tuple[str, str] | None:
    """The API server's last refusal. It is still the reason while a missing pod is tried again, so that a
    pod which is refused again changes no condition.
    """
    refusal = observed.refusal
    if refusal is None or refusal.generation != observed.job.generation:
        return None
    if not (missing or is_held_back(observed, now)):
        return None
    return ("TemplateInvalid" if refusal.invalid else "PodRefused"), refusal.message


def _describe_cut_off(observed: Observed) -> str:
    """What a job does after contact with all its possible nodes was lost."""
    count, node = observed.cut_off, observed.nodes[min(observed.nodes)]
    return (
        f"none of the {count} nodes that could run the job's pods is Ready ({node.name}: {node.why.rstrip('.')}). "
        "The cause may be the control plane or its network, and pods that still run continue to train. "
        "Everstep replaces none of them because of its node until one of these nodes is Ready: "
        "check the API server, its network and the kubelets"
    )


def _describe_node(observed: Observed, pod: Pod, now: float) -> tuple[str, str] | None:
    """Waiting for a node that may return: since when, until when, and which setting decides."""
    node, spec = observed.nodes.get(pod.node), observed.job.spec
    if node is None or spec is None or pod.over:
        return None
    if node.not_ready_for is None:
        return _describe_silence(observed, pod, spec, now)
    since, limit = now - node.not_ready_for, spec.recovery.node_lost_seconds
    until = now - (observed.lost_for(node) or 0.0) + limit
    why = f" ({node.why.rstrip('.')})" if node.why else ""
    text = (
        f"slot {pod.slot} waits for node {pod.node}, which has not been Ready since "
        f"{to_stamp(round(since))}{why}; it is given up and the pod replaced at "
        f"{to_stamp(round(until))} (recovery.nodeLostSeconds: {limit})"
    )
    return "NodeNotReady", text + _describe_yield(observed, pod, spec, now)


def _describe_silence(
    observed: Observed, pod: Pod, spec: JobSpec, now: float
) -> tuple[str, str] | None:
    """The node's lease has expired, or soon will, and Kubernetes does not report it as not Ready
    yet.
    """
    seconds = observed.silent_nodes.get(pod.node)
    if seconds is None:
        return None
    limit = spec.recovery.node_lost_seconds
    text = (
        f"slot {pod.slot} waits for node {pod.node}, whose lease has not been renewed since "
        f"{to_stamp(round(now - seconds))} while those of other nodes were"
    )
    then = _describe_yield(observed, pod, spec, now) or (
        "; it is given up and the pod replaced once Kubernetes has called it not Ready for "
        f"{limit} s (recovery.nodeLostSeconds)"
    )
    return "NodeSilent", text + then


def _describe_yield(observed: Observed, pod: Pod, spec: JobSpec, now: float) -> str:
    seconds, limit = observed.silent_nodes.get(pod.node), spec.recovery.replace_seconds
    if seconds is None or not yields.is_awaited(observed, pod.slot, pod.attempt):
        return ""
    return (
        f"; the job may go on without slot {pod.slot} from {to_stamp(round(now - seconds + limit))} on "
        f"(recovery.replaceAfterSeconds: {limit})"
    )


def _describe_container(pod: Pod) -> tuple[str, str] | None:
    if pod.refused_by_node:
        text = (
            f"pod {pod.name}: {pod.message or 'refused'}; the next attempt follows after "
            f"{starts.REFUSED_SECONDS:.0f} to {starts.LONGEST_REFUSED_SECONDS:.0f} s, on another node if one has room"
        )
        return pod.reason or "PodRefusedByNode", text
    found = pod.ended.report if pod.ended is not None else None
    if found is not None and (pod.misconfigured or pod.failed_alone):
        then = "Everstep tries another node once another pod of the job has started"
        if pod.failed_alone:
            then = (
                f"the next attempt follows {starts.REFUSED_SECONDS:.0f} to {starts.LONGEST_REFUSED_SECONDS:.0f} s "
                "after its creation, on another node if one has room"
            )
        return found.cause.value, f"pod {pod.name}: {found.message}; {then}"
    if pod.waiting in failures.USUAL_WAITS:
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
        return "WaitingForAgents", f"{len(called)} of {len(pods)} agents have answered"
    return "Joining", "all agents have answered; the workers start and join the epoch"

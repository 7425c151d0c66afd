"""API objects → `Observed`. Parsing only; decisions are made in `plan`."""

from collections.abc import Iterable, Mapping
from typing import Any

from everstep_contract import names, report
from everstep_operator import model
from everstep_operator.affinity import avoided_by
from everstep_operator.jobs import genuine
from everstep_operator.jobs.genuine import Owner, Place
from everstep_operator.jobs.observed import Ended, Job, NodeFact, Pod, Rival
from everstep_operator.jobs.stamps import to_seconds
from everstep_operator.model_status import JobStatus


def to_job(obj: Mapping[str, Any]) -> Job:
    metadata, raw_status = obj["metadata"], obj.get("status") or {}
    spec, error = None, ""
    try:
        spec = model.parse_spec(obj.get("spec") or {})
    except model.SpecError as problem:
        error = str(problem)
    workers = (obj.get("spec") or {}).get("workers") or {}
    return Job(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        generation=metadata.get("generation", 0),
        resource_version=metadata.get("resourceVersion", ""),
        created_at=to_seconds(metadata.get("creationTimestamp")) or 0.0,
        deleting="deletionTimestamp" in metadata,
        spec=spec,
        spec_error=error,
        raw_template=workers.get("template") or {},
        status=_to_status(raw_status),
        raw_status=raw_status,
    )


def _to_status(raw: Mapping[str, Any]) -> JobStatus:
    """A status that a user made unreadable is rebuilt from the pods and the job's report."""
    try:
        return JobStatus.model_validate(raw)
    except ValueError:
        return JobStatus()


def to_pods(objects: Iterable[Mapping[str, Any]], owner: Owner) -> tuple[Pod, ...]:
    """The job's own pods, by slot and attempt; all others are ignored: see `genuine`."""
    found = ((obj, genuine.find_place(obj, owner)) for obj in objects)
    pods = (to_pod(obj, place) for obj, place in found if place is not None)
    return tuple(sorted(pods, key=lambda p: (p.slot, p.attempt)))


def to_pod(obj: Mapping[str, Any], place: Place) -> Pod:
    metadata, spec, status = obj["metadata"], obj.get("spec") or {}, obj.get("status") or {}
    container = _trainer_status(spec, status)
    state = container.get("state") or {}
    return Pod(
        name=metadata["name"],
        uid=metadata["uid"],
        slot=place.slot,
        attempt=place.attempt,
        phase=status.get("phase", "Pending"),
        reason=status.get("reason", ""),
        message=status.get("message", ""),
        node=spec.get("nodeName", ""),
        ip=status.get("podIP", ""),
        created_at=to_seconds(metadata.get("creationTimestamp")) or 0.0,
        deleting_until=to_seconds(metadata.get("deletionTimestamp")),
        grace=float(metadata.get("deletionGracePeriodSeconds") or 0),
        avoids=avoided_by(spec),
        scheduling=_scheduling(status),
        waiting=(state.get("waiting") or {}).get("reason", "") or _init_waiting(status)[0],
        waiting_message=(state.get("waiting") or {}).get("message", "") or _init_waiting(status)[1],
        running_since=to_seconds((state.get("running") or {}).get("startedAt")),
        ended=_to_ended(state.get("terminated")),
        last_ended=_to_ended((container.get("lastState") or {}).get("terminated")),
        restarts=container.get("restartCount", 0),
    )


def _trainer_status(spec: Mapping[str, Any], status: Mapping[str, Any]) -> Mapping[str, Any]:
    """The status of the container with our agent. A webhook may have added others."""
    name = _find_trainer(spec.get("containers") or ())
    statuses = status.get("containerStatuses") or ()
    return next((s for s in statuses if s.get("name") == name), {})


def _find_trainer(containers: Iterable[Mapping[str, Any]]) -> str:
    """The name of the container to which the operator has added the agent's port."""
    for container in containers:
        ports = container.get("ports") or ()
        if any(port.get("name") == names.AGENT_PORT_NAME for port in ports):
            return str(container.get("name"))
    return names.TRAINER_CONTAINER


def _init_waiting(status: Mapping[str, Any]) -> tuple[str, str]:
    """Reason and message of an init container that cannot start or fails, and so keeps the trainer
    waiting.
    """
    for container in status.get("initContainerStatuses") or ():
        waiting = (container.get("state") or {}).get("waiting") or {}
        if waiting.get("reason", "PodInitializing") != "PodInitializing":
            return waiting[
                "reason"
            ], f"init container {container.get('name')}: {waiting.get('message', '')}"
    return "", ""


def _scheduling(status: Mapping[str, Any]) -> str:
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return str(condition.get("message") or condition.get("reason") or "not scheduled")
    return ""


def _to_ended(terminated: Mapping[str, Any] | None) -> Ended | None:
    if not terminated:
        return None
    message = terminated.get("message", "")
    return Ended(
        exit_code=terminated.get("exitCode", 0),
        reason=terminated.get("reason", ""),
        message=message,
        report=report.decode(message) if message else None,
        finished_at=to_seconds(terminated.get("finishedAt")) or 0.0,
    )


OVER_STATES = frozenset({"Complete", "Failed"})
WAITING_STATES = frozenset({"Pending", "Starting", "Recovering"})


def is_waiting(job: Mapping[str, Any]) -> bool:
    """Whether a job should train and does not."""
    return (job.get("status") or {}).get("state", "Pending") in WAITING_STATES


def has_figures(job: Mapping[str, Any]) -> bool:
    """Whether the job may train, so that its step and other figures change."""
    suspended = (job.get("spec") or {}).get("suspend")
    return not suspended and (job.get("status") or {}).get("state") not in OVER_STATES


def age_of(job: Mapping[str, Any]) -> tuple[float, str]:
    """Sort key: jobs in order of creation."""
    metadata = job["metadata"]
    return to_seconds(metadata.get("creationTimestamp")) or 0.0, metadata["uid"]


def to_rival(job: Mapping[str, Any], pods: Iterable[Pod]) -> Rival:
    """A job holds nodes in vain if some of its pods are scheduled, fewer than it needs to train, and
    others are not.
    """
    living = [p for p in pods if p.phase in ("Pending", "Running") and not p.deleting]
    placed = [bool(p.node) for p in living]
    workers = (job.get("spec") or {}).get("workers") or {}
    least = workers.get("minReplicas") or workers.get("replicas", 1)
    held = (job.get("status") or {}).get("gang") or {}
    holds = 0 < sum(placed) < least and not all(placed)
    return Rival(holds=holds, gave_back_at=to_seconds(held.get("since")))


def to_node(obj: Mapping[str, Any], since: float | None, now: float) -> NodeFact:
    """`since`: when this operator first saw the node not Ready; other hosts' clocks are not used."""
    why = describe_not_ready(obj)
    waited = None if not why else max(0.0, now - since) if since is not None else 0.0
    metadata = obj["metadata"]
    rack = (metadata.get("labels") or {}).get(names.NODE_RACK, "")
    return NodeFact(name=metadata["name"], not_ready_for=waited, why=why, rack=rack)


def describe_not_ready(obj: Mapping[str, Any]) -> str:
    """Why the node is not Ready; empty if it is."""
    ready = _find_ready(obj)
    if ready is None:
        return "the node has never reported Ready"
    if ready.get("status") == "True":
        return ""
    return f"Ready={ready.get('status')}: {ready.get('message') or ready.get('reason')}"


def find_transition(obj: Mapping[str, Any]) -> str:
    """When the node's Ready condition last changed its status, according to the node's object. To be
    compared only with such times, because the operator uses no other host's clock. Empty: unknown.
    """
    return str((_find_ready(obj) or {}).get("lastTransitionTime") or "")


def _find_ready(obj: Mapping[str, Any]) -> Mapping[str, Any] | None:
    conditions = (obj.get("status") or {}).get("conditions") or ()
    return next((c for c in conditions if c.get("type") == "Ready"), None)

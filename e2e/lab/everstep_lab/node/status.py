"""Builds a pod's status from the state of its containers, by the kubelet's rules. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from everstep_lab.node.clock import stamp

Object = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    reason: str
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    started_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminated:
    exit_code: int
    signal: int = 0
    reason: str
    message: str = ""
    started_at: datetime | None
    finished_at: datetime
    container_id: str


State = Waiting | Running | Terminated


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """The state of one container of the pod's spec."""

    name: str
    image: str
    state: State
    last: Terminated | None = None
    restarts: int = 0
    started: bool = False
    ready: bool = False
    container_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """Why the node rejected the pod or made it fail."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PodState:
    containers: Sequence[Container]
    host_ip: str
    pod_ip: str
    start_time: datetime
    failed: Failed | None = None


def choose_phase(policy: str, containers: Sequence[Container], *, deleted: bool = False) -> str:
    """Pending, Running, Succeeded or Failed. A pod that is being deleted is never restarted."""
    ended = [c.state for c in containers if isinstance(c.state, Terminated)]
    if len(ended) == len(containers):
        codes = [state.exit_code for state in ended]
        if deleted or policy == "Never" or (policy == "OnFailure" and not any(codes)):
            return "Failed" if any(codes) else "Succeeded"
        return "Running"
    if any(isinstance(c.state, Waiting) and c.last is None for c in containers):
        return "Pending"
    return "Running"


def build_status(pod: Object, state: PodState, now: datetime) -> Object:
    """The status to patch. Conditions of other writers, such as the scheduler, are kept."""
    deleted = bool(pod["metadata"].get("deletionTimestamp"))
    phase = choose_phase(
        pod["spec"].get("restartPolicy", "Always"), state.containers, deleted=deleted
    )
    status: Object = {
        "phase": "Failed" if state.failed else phase,
        "hostIP": state.host_ip,
        "hostIPs": [{"ip": state.host_ip}],
        "podIP": state.pod_ip,
        "podIPs": [{"ip": state.pod_ip}],
        "startTime": stamp(state.start_time),
        "containerStatuses": [_container_status(c) for c in state.containers],
        "conditions": _conditions(pod, state, now),
    }
    if state.failed:
        status["reason"], status["message"] = state.failed.reason, state.failed.message
        status["containerStatuses"] = []
    return status


def _conditions(pod: Object, state: PodState, now: datetime) -> list[Object]:
    """For a pod that has ended, Ready has the reason PodCompleted, as in the kubelet."""
    over = state.failed or all(isinstance(c.state, Terminated) for c in state.containers)
    unready = [c.name for c in state.containers if not c.ready]
    why = "PodCompleted" if over else "ContainersNotReady"
    text = "" if over else f"containers with unready status: [{' '.join(unready)}]"
    ready = (not unready and not state.failed, why, text)
    set_up = not (state.failed or any(_is_creating(c) for c in state.containers))
    ours = {
        "PodReadyToStartContainers": (set_up and not over, "", ""),
        "Initialized": (True, "", ""),
        "ContainersReady": ready,
        "Ready": ready,
    }
    old = {c["type"]: c for c in (pod.get("status") or {}).get("conditions") or []}
    kept = [condition for kind, condition in old.items() if kind not in ours]
    return [*kept, *(_condition(kind, *value, old.get(kind), now) for kind, value in ours.items())]


def _condition(
    kind: str, good: bool, reason: str, message: str, old: Mapping[str, Any] | None, now: datetime
) -> Object:
    status = "True" if good else "False"
    since = old["lastTransitionTime"] if old and old.get("status") == status else stamp(now)
    condition: Object = {"type": kind, "status": status, "lastTransitionTime": since}
    if not good and reason:
        condition.update(reason=reason, message=message)
    return condition


def _is_creating(container: Container) -> bool:
    return isinstance(container.state, Waiting) and container.state.reason == "ContainerCreating"


def _container_status(container: Container) -> Object:
    status: Object = {
        "name": container.name,
        "image": container.image,
        "imageID": f"lab://{container.image}" if container.container_id else "",
        "restartCount": container.restarts,
        "ready": container.ready,
        "started": container.started,
        "state": _state(container.state),
        "lastState": _state(container.last) if container.last else {},
    }
    if container.container_id:
        status["containerID"] = container.container_id
    return status


def _state(state: State) -> Object:
    match state:
        case Waiting(reason=reason, message=message):
            waiting = {"reason": reason}
            if message:
                waiting["message"] = message
            return {"waiting": waiting}
        case Running(started_at=moment):
            return {"running": {"startedAt": stamp(moment)}}
        case Terminated():
            return {"terminated": _terminated(state)}


def _terminated(state: Terminated) -> Object:
    """A container that never ran has the Unix epoch as its start time, as with containerd."""
    started = stamp(state.started_at) if state.started_at else "1970-01-01T00:00:00Z"
    document: Object = {
        "exitCode": state.exit_code, "reason": state.reason, "startedAt": started,
        "finishedAt": stamp(state.finished_at), "containerID": state.container_id,
    }  # fmt: skip
    if state.message:
        document["message"] = state.message
    return document

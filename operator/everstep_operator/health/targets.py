"""Exporter pods → whom to ask about which node."""

from collections.abc import Iterable, Mapping

from everstep_operator.health.outcomes import Target


def choose_targets(pods: Iterable[Mapping[str, object]], *, port: int) -> dict[str, Target]:
    """One exporter per node from a list of Pod objects; of two (an update rolls on) the ready,
    younger one."""
    best: dict[str, tuple[tuple[bool, str], Target]] = {}
    for pod in pods:
        found = _target(pod, port)
        if found is None:
            continue
        rank = (_is_ready(pod), str(_part(pod, "metadata").get("creationTimestamp", "")))
        if found.node not in best or rank > best[found.node][0]:
            best[found.node] = (rank, found)
    return {node: target for node, (_, target) in sorted(best.items())}


def _target(pod: Mapping[str, object], port: int) -> Target | None:
    spec, status = _part(pod, "spec"), _part(pod, "status")
    node, address = spec.get("nodeName"), status.get("podIP")
    if not node or not address or status.get("phase") in ("Succeeded", "Failed"):
        return None
    host = f"[{address}]" if ":" in str(address) else address
    return Target(node=str(node), url=f"http://{host}:{_port_of(spec, port)}/metrics")


def _port_of(spec: Mapping[str, object], default: int) -> int:
    """The container port called "metrics", else the default if the pod names it, else its only
    one."""
    containers = spec.get("containers")
    ports = [
        port
        for container in (containers if isinstance(containers, list) else [])
        for port in container.get("ports") or ()
    ]
    named = [p["containerPort"] for p in ports if p.get("name") == "metrics"]
    numbers = [p["containerPort"] for p in ports]
    if named:
        return int(named[0])
    return int(numbers[0]) if len(numbers) == 1 and default not in numbers else default


def _is_ready(pod: Mapping[str, object]) -> bool:
    conditions = _part(pod, "status").get("conditions")
    return any(
        c.get("type") == "Ready" and c.get("status") == "True"
        for c in (conditions if isinstance(conditions, list) else [])
    )


def _part(pod: Mapping[str, object], name: str) -> Mapping[str, object]:
    part = pod.get(name)
    return part if isinstance(part, Mapping) else {}

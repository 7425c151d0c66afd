"""Exporter pods → which exporter to ask about which node. Pure.

An exporter can cause a node to be cordoned and jobs to move, so it is trusted only if

1. its pod is in a namespace that the operator was configured with, because any user can write
labels;

2. the pod's controller is a DaemonSet, so that the right to create pods alone is not enough;

3. and only for the node on which its pod runs, whatever its page claims. A page that names another
node of the cluster is not used at all.

Two exporters on one node may contradict each other, and nothing shows which is right. So
neither is asked: the node is *contested*, which leads to the verdict unknown and to no action.
A pod that is being deleted, or is not Ready, is ignored if another one is Ready: an update of
the DaemonSet contests nothing.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from everstep_operator.health.outcomes import FailureKind, Scrape, ScrapeFailure, Target
from everstep_operator.health.parse import Page
from everstep_operator.world import controller_of

Pod = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    by_node: Mapping[str, Target]
    contested: Mapping[str, tuple[str, ...]]
    """Nodes with more than one exporter, and these pods (namespace/name)."""
    strangers: tuple[str, ...]
    """Pods with an exporter's labels that are not trusted, and why."""


def choose_targets(pods: Iterable[Pod], *, namespaces: Collection[str], port: int) -> Targets:
    """`pods`: Pod objects with an exporter's labels; a duplicate counts once."""
    by_node: dict[str, dict[str, Pod]] = {}
    strangers: dict[str, str] = {}
    for pod in pods:
        name = _name_of(pod)
        if why := _distrust(pod, namespaces):
            strangers[name] = f"{name}: {why}"
        elif _is_running(pod):
            by_node.setdefault(str(_part(pod, "spec")["nodeName"]), {})[name] = pod
    chosen = {node: _choose(found) for node, found in sorted(by_node.items())}
    return Targets(
        by_node={n: _target(n, pods[0], port) for n, pods in chosen.items() if len(pods) == 1},
        contested={n: tuple(map(_name_of, pods)) for n, pods in chosen.items() if len(pods) > 1},
        strangers=tuple(text for _, text in sorted(strangers.items())),
    )


def build_failures(targets: Targets, known: Iterable[str], now: float) -> list[Scrape]:
    """For nodes without an exporter to ask: contested ones, and `known` ones whose exporter is
    gone. They count as silent.
    """
    absent = (n for n in known if n not in targets.by_node and n not in targets.contested)
    none = "there is no dcgm-exporter pod on the node"
    contested = targets.contested.items()
    return [
        *(_failure(node, FailureKind.ABSENT, none, now) for node in absent),
        *(_failure(n, FailureKind.CONTESTED, _describe_contest(p), now) for n, p in contested),
    ]


def refuse_foreign(scrape: Scrape, nodes: Collection[str]) -> Scrape:
    """The scrape, as a failure if its page names another of the `nodes`. A name that no node has is no
    proof: some exporters give that of their pod.
    """
    page = scrape.outcome
    if not isinstance(page, Page) or page.hostname == scrape.node or page.hostname not in nodes:
        return scrape
    message = f"the exporter's address gives the page of node {page.hostname}"
    return replace(scrape, outcome=ScrapeFailure(kind=FailureKind.FOREIGN, message=message))


def _failure(node: str, kind: FailureKind, message: str, now: float) -> Scrape:
    return Scrape(
        node=node, started=now, seconds=0.0, outcome=ScrapeFailure(kind=kind, message=message)
    )


def _describe_contest(pods: Collection[str]) -> str:
    return (
        f"{len(pods)} exporters run on the node ({', '.join(pods)}), and Everstep asks none of them"
    )


def _distrust(pod: Pod, namespaces: Collection[str]) -> str:
    """Why the pod is not trusted; empty if it is."""
    if _part(pod, "metadata").get("namespace") not in namespaces:
        return "its namespace is not among the exporters' namespaces"
    owner = controller_of(pod)
    group = str(owner.get("apiVersion", "")).partition("/")[0] if owner else ""
    if owner is None or (group, owner.get("kind")) != ("apps", "DaemonSet"):
        return "no DaemonSet controls it"
    return ""


def _is_running(pod: Pod) -> bool:
    status = _part(pod, "status")
    over = status.get("phase") in ("Succeeded", "Failed")
    return bool(_part(pod, "spec").get("nodeName") and status.get("podIP") and not over)


def _choose(found: Mapping[str, Pod]) -> list[Pod]:
    """The best of a node's exporters; more than one if nothing distinguishes them."""
    best = max(map(_rank, found.values()))
    return [pod for _, pod in sorted(found.items()) if _rank(pod) == best]


def _rank(pod: Pod) -> tuple[bool, bool]:
    return not _part(pod, "metadata").get("deletionTimestamp"), _is_ready(pod)


def _target(node: str, pod: Pod, port: int) -> Target:
    spec, address = _part(pod, "spec"), str(_part(pod, "status")["podIP"])
    host = f"[{address}]" if ":" in address else address
    return Target(node=node, url=f"http://{host}:{_port_of(spec, port)}/metrics")


def _name_of(pod: Pod) -> str:
    metadata = _part(pod, "metadata")
    return f"{metadata.get('namespace', '')}/{metadata.get('name', '')}"


def _port_of(spec: Mapping[str, object], default: int) -> int:
    """The container port called "metrics", else the pod's only port, else the default."""
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


def _is_ready(pod: Pod) -> bool:
    conditions = _part(pod, "status").get("conditions")
    return any(
        c.get("type") == "Ready" and c.get("status") == "True"
        for c in (conditions if isinstance(conditions, list) else [])
    )


def _part(pod: Pod, name: str) -> Mapping[str, object]:
    part = pod.get(name)
    return part if isinstance(part, Mapping) else {}

"""Which nodes are out of use, and why. Pure."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from everstep_contract import names
from everstep_kubectl import text
from everstep_kubectl.devices import count_gpus
from everstep_kubectl.incidents import Evidence, build_evidence

Raw = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantine:
    name: str
    node: str
    reason: str
    verdict: str
    state: str
    message: str
    advice: str
    """The operator's message on the state of the quarantine."""
    incident: str
    gpu: str
    decided_at: str
    evidence: tuple[Evidence, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    name: str
    exists: bool
    ready: bool
    schedulable: bool
    gpus: int
    allocatable: int
    marked: bool
    """Whether it carries Everstep's cordon."""
    answered: tuple[str, ...]
    """Evidence that was answered by a release: it never quarantines the node again."""
    taints: tuple[str, ...]
    quarantines: tuple[Quarantine, ...]

    @property
    def verdict(self) -> str:
        """The node's state in one word, for people."""
        if not self.exists:
            return "Absent"
        if self.quarantines:
            return "Quarantined" if self.marked else self.quarantines[0].state
        if not self.ready:
            return "NotReady"
        return "InUse" if self.schedulable else "CordonedByOthers"


def build_nodes(objects: Iterable[Raw]) -> tuple[Node, ...]:
    """All nodes that are in a list of Nodes and NodeQuarantines, or named in it."""
    listed = list(objects)
    quarantines: dict[str, list[Quarantine]] = {}
    for raw in listed:
        if raw.get("kind") == names.QUARANTINE_KIND:
            built = build_quarantine(raw)
            quarantines.setdefault(built.node, []).append(built)
    raws = {str(r["metadata"]["name"]): r for r in listed if r.get("kind") == "Node"}
    nodes = [_build(name, raw, quarantines.get(name, [])) for name, raw in raws.items()]
    nodes += [_absent(name, found) for name, found in quarantines.items() if name not in raws]
    return tuple(sorted(nodes, key=lambda n: n.name))


def choose_shown(nodes: Iterable[Node]) -> tuple[Node, ...]:
    """The nodes with GPUs, and all that have a quarantine."""
    return tuple(n for n in nodes if n.gpus or n.quarantines)


def build_quarantine(raw: Raw) -> Quarantine:
    spec, status = raw.get("spec") or {}, raw.get("status") or {}
    return Quarantine(
        name=str(raw["metadata"]["name"]),
        node=str(spec.get("nodeName") or ""),
        reason=str(spec.get("reason") or ""),
        verdict=str(spec.get("verdict") or ""),
        state=str(status.get("state") or "Pending"),
        message=str(spec.get("message") or ""),
        advice=str(status.get("message") or ""),
        incident=str(spec.get("incident") or ""),
        gpu=str(spec.get("gpu") or ""),
        decided_at=str(spec.get("decidedAt") or ""),
        evidence=tuple(build_evidence(e) for e in spec.get("evidence") or ()),
    )


def _build(name: str, raw: Raw, quarantines: Sequence[Quarantine]) -> Node:
    spec, status = raw.get("spec") or {}, raw.get("status") or {}
    annotations = raw["metadata"].get("annotations") or {}
    conditions = {c["type"]: c["status"] for c in status.get("conditions") or ()}
    return Node(
        name=name,
        exists=True,
        ready=conditions.get("Ready") == "True",
        schedulable=not spec.get("unschedulable"),
        gpus=count_gpus(status.get("capacity") or {}),
        allocatable=count_gpus(status.get("allocatable") or {}),
        marked=names.ANNOTATION_CORDONED in annotations,
        answered=tuple(_answered(annotations.get(names.ANNOTATION_ANSWERED))),
        taints=tuple(f"{t['key']}:{t['effect']}" for t in spec.get("taints") or ()),
        quarantines=tuple(quarantines),
    )


def _absent(name: str, quarantines: Sequence[Quarantine]) -> Node:
    return Node(
        name=name, exists=False, ready=False, schedulable=False, gpus=0, allocatable=0,
        marked=False, answered=(), taints=(), quarantines=tuple(quarantines),
    )  # fmt: skip


def _answered(annotation: str | None) -> list[str]:
    try:
        found = json.loads(annotation or "{}").get("evidence") or []
    except (ValueError, AttributeError):
        return ["(the annotation cannot be read)"]
    return [
        f"{e.get('kind')}{f' {c}' if (c := e.get('code')) else ''} on {e.get('gpu')}" for e in found
    ]


def is_marked(node: Raw) -> bool:
    """Whether the node still carries Everstep's taint or cordon."""
    taints = (node.get("spec") or {}).get("taints") or ()
    annotations = node["metadata"].get("annotations") or {}
    tainted = any(t.get("key") == names.TAINT_QUARANTINE for t in taints)
    return tainted or names.ANNOTATION_CORDONED in annotations


def render_table(nodes: Sequence[Node], now: float) -> str:
    if not nodes:
        return "no node has GPUs, and none is in quarantine"
    rows: list[list[object]] = []
    for node in nodes:
        held = node.quarantines[0] if node.quarantines else None
        gpus = f"{node.allocatable}/{node.gpus}"
        if held is None:
            rows.append([node.name, node.verdict, gpus, None, None, None, None])
            continue
        since = text.age(held.decided_at, now)
        rows.append(
            [node.name, node.verdict, gpus, held.verdict, since, held.incident, held.message]
        )
    head = ["NODE", "STATE", "GPUS", "VERDICT", "SINCE", "INCIDENT", "WHY"]
    return text.table(head, rows)


def render_why(node: Node, events: Sequence[Raw], now: float) -> str:
    warned = any(is_warning(e) for e in events)
    lines = [f"{node.name}: {node.verdict}", *(_why(node, warned=warned))]
    for q in node.quarantines:
        fields = {
            "verdict": f"{q.verdict} ({q.reason}), {text.age(q.decided_at, now)} ago",
            "what": q.message,
            "evidence": "\n".join(
                f"{e.kind}{f' {e.code}' if e.code else ''} on {e.gpu}, first seen {e.first_seen}"
                for e in q.evidence
            ),
            "state": f"{q.state}: {q.advice}" if q.advice else q.state,
            "incident": q.incident,
            "release": f"kubectl everstep release {node.name}",
        }
        lines += ["", f"quarantine {q.name}", text.block(fields)]
    if node.answered:
        answered = "\n".join(node.answered)
        lines += [
            "",
            text.block({"answered": answered}, ""),
            "(released: these do not quarantine it again)",
        ]
    if events:
        rows = [[text.age(_last(e), now), e.get("reason"), e.get("message")] for e in events]
        lines += ["", text.table(["AGO", "EVENT", "MESSAGE"], rows)]
    return "\n".join(lines)


_LEAVING = "Jobs have left it or are leaving it, and new pods avoid it."
_WHERE_JOBS_ARE = {
    "Quarantined": _LEAVING,
    "Pending": _LEAVING,
    "OverBudget": "Jobs stay on it, because the cordon budget is spent; new pods prefer other nodes.",
}
"""By the state of a quarantine, the strictest first; other states explain themselves."""


def is_warning(event: Raw) -> bool:
    """Whether Everstep warned of something. An operator that only observes writes no quarantine."""
    source = (event.get("source") or {}).get("component") or event.get("reportingComponent")
    return event.get("type") == "Warning" and source == "everstep-operator"


def _why(node: Node, *, warned: bool = False) -> list[str]:
    if node.quarantines:
        return [
            f"  {told}"
            for state, told in _WHERE_JOBS_ARE.items()
            if any(q.state == state for q in node.quarantines)
        ][:1]
    known = "Everstep has no evidence against it"
    cordoned = f"somebody else cordoned it: kubectl uncordon {node.name}"
    if warned:
        known = "Everstep has warned of it (see the Events below), but no NodeQuarantine names it"
        cordoned = "somebody else cordoned it"
    explained = {
        "Absent": "  There is no such node.",
        "NotReady": f"  {known}; its kubelet does not report to the API server.",
        "CordonedByOthers": f"  {known}; {cordoned}",
        "InUse": f"  {known}.",
    }
    lines = [explained[node.verdict]]
    if node.allocatable < node.gpus:
        lines.append(
            f"  Its device plugin offers {node.allocatable} of {node.gpus} GPUs; the other GPUs are not allocatable."
        )
    foreign = [t for t in node.taints if not t.startswith("node.kubernetes.io/unschedulable")]
    if foreign:
        lines.append(f"  Taints: {', '.join(foreign)}")
    return lines


def _last(event: Raw) -> Any:
    return event.get("lastTimestamp") or event.get("eventTime") or event.get("firstTimestamp")


def choose_events(events: Iterable[Raw], node: str, limit: int = 8) -> list[Raw]:
    """The newest events of the node and its quarantines, and events that name the node, newest
    last.
    """
    chosen = [
        e
        for e in events
        if (e.get("involvedObject") or {}).get("name") == node
        or f"node {node}:" in str(e.get("message"))
    ]
    return sorted(chosen, key=lambda e: str(_last(e)))[-limit:]

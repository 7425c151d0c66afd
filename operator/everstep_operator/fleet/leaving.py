"""`release-all`: what must be undone before the operator is uninstalled. Pure.

Nodes first, then NodeQuarantines: an interrupted run can be repeated with the same result.
Answered evidence and the expected GPUs stay on the nodes, so that a later installation does not
report old faults as new.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from everstep_contract import names
from everstep_operator.nodes import NodeFacts
from everstep_operator.quarantines import Quarantine

Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Undoing:
    """A patch of one node, with the version that was read, and its description."""

    node: str
    body: dict[str, Any]
    message: str


def plan_undoing(raw: Object, node: NodeFacts, quarantines: Iterable[Quarantine]) -> Undoing | None:
    """None if the node has none of Everstep's marks. A cordon is removed only if it is known to be
    Everstep's.
    """
    annotations = raw["metadata"].get("annotations") or {}
    if names.ANNOTATION_CORDONED not in annotations and not node.tainted:
        return None
    ours = node.unschedulable and _is_ours(node, quarantines)
    others = [taint for taint in node.taints if taint.get("key") != names.TAINT_QUARANTINE]
    spec: dict[str, Any] = {"taints": others} if node.tainted else {}
    if ours:
        spec["unschedulable"] = None
    metadata = {
        "resourceVersion": node.version,
        "annotations": {names.ANNOTATION_CORDONED: None},
    }
    body = {"metadata": metadata, **({"spec": spec} if spec else {})}
    return Undoing(node=node.name, body=body, message=_describe(node, ours))


def _is_ours(node: NodeFacts, quarantines: Iterable[Quarantine]) -> bool:
    """According to the mark; if it is unreadable, according to the status of the node's
    NodeQuarantine.
    """
    mark = node.mark or node.stale
    if mark is not None:
        return mark.cordoned
    return any((q.status or {}).get("cordoned") for q in quarantines if q.node == node.name)


def _describe(node: NodeFacts, ours: bool) -> str:
    if ours:
        return f"node {node.name}: uncordoned, Everstep's taint and mark removed"
    if node.unschedulable:
        return (
            f"node {node.name}: Everstep's taint and mark removed; it stays cordoned, "
            f"because the cordon is not known to be Everstep's (kubectl uncordon {node.name})"
        )
    return f"node {node.name}: Everstep's taint and mark removed"

"""`release-all`: what has to be undone before the operator goes for good. Pure.

Nodes first, NodeQuarantines after them: cut anywhere and begun anew, it comes to the same end. What
people have answered, and which GPUs a node should have, stays on the nodes: that is memory, no mark,
and who installs again must not be told of old faults as if they were new.
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
    """A patch of one node, with the version that was read, and what it does in words."""

    node: str
    body: dict[str, Any]
    message: str


def plan_undoing(raw: Object, node: NodeFacts, quarantines: Iterable[Quarantine]) -> Undoing | None:
    """None if the node bears no mark of ours. A cordon is lifted only if it is known to be ours."""
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
    """The mark says it; of a mark that cannot be read, the status of the node's NodeQuarantine does."""
    if node.mark is not None:
        return node.mark.cordoned
    return any((q.status or {}).get("cordoned") for q in quarantines if q.node == node.name)


def _describe(node: NodeFacts, ours: bool) -> str:
    if ours:
        return f"node {node.name}: uncordoned, our taint and mark removed"
    if node.unschedulable:
        return (
            f"node {node.name}: our taint and mark removed; it stays cordoned, for the cordon is "
            f"not known to be ours (kubectl uncordon {node.name})"
        )
    return f"node {node.name}: our taint and mark removed"

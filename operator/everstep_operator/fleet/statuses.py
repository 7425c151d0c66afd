"""The whole status of a NodeQuarantine, from the object and its node."""

from typing import Any

from everstep_operator.evidence import to_rfc3339
from everstep_operator.nodes import NodeFacts
from everstep_operator.quarantines import Quarantine, binds


def build_status(quarantine: Quarantine, node: NodeFacts | None) -> dict[str, Any]:
    how = f"To release the node: kubectl delete nodequarantine {quarantine.name}"
    if node is None:
        return _status("NodeAbsent", f"There is no node {quarantine.node}.")
    if not binds(quarantine, node):
        why = f"node {node.name} is another machine now ({node.machine})"
        return {**_status("NodeReplaced", f"{why}: nothing is marked."), "releasedBy": why}
    if not quarantine.cordon:
        return _status("OverBudget", f"Not cordoned, the budget is spent; jobs leave it. {how}")
    mark = node.mark
    if mark is None or mark.quarantine != quarantine.name:
        return _status("Pending", "To be cordoned and tainted.")
    return {
        **_status("Quarantined", f"Cordoned and tainted. {how}"),
        "cordoned": mark.cordoned,
        "cordonedAt": to_rfc3339(mark.at),
    }


def _status(state: str, message: str) -> dict[str, Any]:
    return {"state": state, "message": message}

"""The complete status of a NodeQuarantine, from the object and its node."""

from typing import Any

from everstep_operator.evidence import to_rfc3339
from everstep_operator.fleet.release import LOST_DEFINITION, LOST_MANY, LOST_UNSEEN
from everstep_operator.nodes import NodeFacts
from everstep_operator.quarantines import Quarantine, binds

PUT_BACK = "PutBack"
HOW_LOST = {
    LOST_MANY: "many NodeQuarantines vanished at once without a delete event",
    LOST_DEFINITION: "its CustomResourceDefinition was deleted and recreated",
    LOST_UNSEEN: "it vanished while no operator was running",
}


def build_status(quarantine: Quarantine, node: NodeFacts | None, now: float) -> dict[str, Any]:
    status = _build_state(quarantine, node)
    if not quarantine.put_back:
        return status
    return {**status, "conditions": [_build_condition(quarantine, now)]}


def describe_put_back(quarantine: Quarantine) -> str:
    why = HOW_LOST.get(quarantine.put_back, quarantine.put_back)
    return (
        f"NodeQuarantine {quarantine.name} was lost ({why}) and is recreated; the "
        f"node stays as it was. To release it: kubectl delete nodequarantine {quarantine.name}"
    )


def _build_condition(quarantine: Quarantine, now: float) -> dict[str, Any]:
    held = [c for c in (quarantine.status or {}).get("conditions", ()) if c["type"] == PUT_BACK]
    return {
        "type": PUT_BACK,
        "status": "True",
        "observedGeneration": 0,
        "lastTransitionTime": held[0]["lastTransitionTime"] if held else to_rfc3339(now),
        "reason": quarantine.put_back,
        "message": describe_put_back(quarantine),
    }


def _build_state(quarantine: Quarantine, node: NodeFacts | None) -> dict[str, Any]:
    how = f"kubectl delete nodequarantine {quarantine.name}"
    if node is None:
        text = f"There is no node {quarantine.node}. If it comes back, it is cordoned again; if it will not: {how}"
        return {**_status("NodeAbsent", text), **_NO_CORDON}
    if not binds(quarantine, node):
        why = f"node {node.name} is another machine now ({node.machine})"
        text = f"{why}: nothing is marked. If the former machine will not come back: {how}"
        return {**_status("NodeReplaced", text), **_NO_CORDON, "releasedBy": why}
    if not quarantine.cordon:
        return _status(
            "OverBudget",
            f"Not cordoned, and jobs stay: the cordon budget is spent. To release the node: {how}",
        )
    mark = node.mark
    if mark is None or mark.quarantine != quarantine.name:
        return _status("Pending", "To be cordoned and tainted.")
    return {
        **_status("Quarantined", f"Cordoned and tainted. To release the node: {how}"),
        "cordoned": mark.cordoned,
        "cordonedAt": to_rfc3339(mark.at),
    }


_NO_CORDON = {"cordoned": False, "cordonedAt": None}
"""Everstep's cordon has ended with the Node object: if the one that comes back is unschedulable, somebody else
made it so.
"""


def _status(state: str, message: str) -> dict[str, Any]:
    """Without what a former state had in addition: the machine may be back."""
    return {"state": state, "message": message, "releasedBy": ""}

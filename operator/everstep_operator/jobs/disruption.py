"""Whether the API server has lost contact with all nodes that could run a job's pods. Pure.

If none of them is Ready, the fault is more likely in the control plane or its network than in all
these nodes at once, so the pods may still train. (Kubernetes stops its own evictions in this case,
which it calls full disruption.) No node could take a new pod either, so nothing is gained by
giving up one that may train.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from everstep_operator.jobs import observe
from everstep_operator.jobs.room import sum_requests
from everstep_operator.world import Object

CONTROL_PLANE = "node-role.kubernetes.io/control-plane"
"""Label, and key of the taint, of nodes that run the control plane: the API server reaches them
also without a network.
"""


def count_cut_off(
    nodes: Iterable[Object], pod_spec: Mapping[str, Any], own: Collection[str]
) -> int:
    """How many nodes could run a pod like this one, if none of them is Ready; else 0. `own`: those that
    do.
    """
    devices = [name for name, count in sum_requests(pod_spec).items() if "/" in name and count > 0]
    selector, tolerates = pod_spec.get("nodeSelector") or {}, _tolerates_control_plane(pod_spec)
    usable = [
        node
        for node in nodes
        if node["metadata"]["name"] in own or _could_run(node, devices, selector, tolerates)
    ]
    return len(usable) if all(map(observe.describe_not_ready, usable)) else 0


def _could_run(
    node: Object, devices: Iterable[str], selector: Mapping[str, str], on_control_plane: bool
) -> bool:
    """Whether the node has the labels and the kinds of devices. One that is cordoned or full counts,
    too: if it is Ready, the API server reaches nodes of this kind.
    """
    labels = node["metadata"].get("labels") or {}
    capacity = (node.get("status") or {}).get("capacity") or {}
    return (
        (on_control_plane or CONTROL_PLANE not in labels)
        and all(labels.get(name) == value for name, value in selector.items())
        and all(str(capacity.get(name, "0")) != "0" for name in devices)
    )


def _tolerates_control_plane(pod_spec: Mapping[str, Any]) -> bool:
    found = (toleration.get("key") for toleration in pod_spec.get("tolerations") or ())
    return any(key in (CONTROL_PLANE, None, "") for key in found)

"""Whether the API server has lost contact with all nodes that could run a job's pods. Pure.

If none of them is Ready, and the last two were lost at about the same time, the fault is more likely
in the control plane or its network than in all these nodes, so the pods may still train.
(Kubernetes stops its own evictions in this case, which it calls full disruption.) No node could
take a new pod either, so nothing is gained by giving up one that may train. A node that is lost
alone is given up: an autoscaler may create another one for its pod.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from everstep_operator.jobs import observe
from everstep_operator.jobs.room import sum_requests
from everstep_operator.jobs.stamps import to_seconds
from everstep_operator.world import Object

CONTROL_PLANE = "node-role.kubernetes.io/control-plane"
"""Label, and key of the taint, of nodes that run the control plane: the API server reaches them
also without a network.
"""
TOGETHER_SECONDS = 120.0
"""Nodes that were lost within this time of each other have probably been lost for the same reason."""


def count_cut_off(
    nodes: Iterable[Object], pod_spec: Mapping[str, Any], own: Collection[str]
) -> int:
    """How many nodes could run a pod like this one, if the API server has lost contact with all of
    them; else 0. `own`: those that do.
    """
    devices = [name for name, count in sum_requests(pod_spec).items() if "/" in name and count > 0]
    selector, tolerates = pod_spec.get("nodeSelector") or {}, _tolerates_control_plane(pod_spec)
    usable = [
        node
        for node in nodes
        if node["metadata"]["name"] in own or _could_run(node, devices, selector, tolerates)
    ]
    away = all(map(observe.describe_not_ready, usable)) and _were_lost_together(usable)
    return len(usable) if away else 0


def _were_lost_together(nodes: Iterable[Object]) -> bool:
    """Whether the last two were. Earlier ones may have waited for a repair for days."""
    times = sorted(to_seconds(observe.find_transition(node)) or -math.inf for node in nodes)
    return len(times) > 1 and times[-1] - times[-2] <= TOGETHER_SECONDS


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

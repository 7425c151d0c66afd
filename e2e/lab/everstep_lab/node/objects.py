"""Builds the Kubernetes objects that a node writes about itself. Pure."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from everstep_lab.exporter.gpu import MODEL, Gpu
from everstep_lab.exporter.render import DRIVER_VERSION
from everstep_lab.exporter.server import PORT as EXPORTER_PORT
from everstep_lab.node.clock import micro_stamp, stamp
from everstep_lab.node.devices import RESOURCE, count_allocatable
from everstep_lab.seam import NodeSpec

Object = dict[str, Any]
KUBELET_PORT = 10250
LEASE_SECONDS = 4
"""Four times the interval between two renewals, as for a kubelet."""
LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
EXPORTER_NAMESPACE = "kube-system"
EXPORTER = "dcgm-exporter"
_CAPACITY = {"cpu": "64", "memory": "512Gi", "ephemeral-storage": "1Ti", "pods": "110"}


def build_node(spec: NodeSpec) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": spec.name,
            "labels": {
                "kubernetes.io/hostname": spec.name,
                "kubernetes.io/os": "linux",
                "kubernetes.io/arch": "amd64",
                "node.kubernetes.io/instance-type": "lab.gpu",
                "topology.kubernetes.io/region": "lab",
                "topology.kubernetes.io/zone": f"lab-{'abc'[(spec.index - 1) % 3]}",
                "nvidia.com/gpu.present": "true",
                "nvidia.com/gpu.count": str(spec.gpus),
                "nvidia.com/gpu.product": MODEL.replace(" ", "-"),
                "nvidia.com/cuda.driver-version.full": DRIVER_VERSION,
            },
        },
        "spec": {"providerID": f"lab://{spec.name}"},
    }


def build_node_status(
    spec: NodeSpec, gpus: Sequence[Gpu], *, boot_id: str, ready_since: datetime, now: datetime
) -> Object:
    """The node's status, for a strategic merge patch, which keeps other writers' conditions."""
    return {
        "status": {
            "addresses": [
                {"type": "InternalIP", "address": spec.ip},
                {"type": "Hostname", "address": spec.name},
            ],
            "capacity": {**_CAPACITY, RESOURCE: str(len(gpus))},
            "allocatable": {**_CAPACITY, RESOURCE: str(count_allocatable(gpus))},
            "daemonEndpoints": {"kubeletEndpoint": {"Port": KUBELET_PORT}},
            "nodeInfo": {
                "machineID": f"lab-machine-{spec.index}",
                "systemUUID": f"lab-system-{spec.index}",
                "bootID": boot_id,
                "kernelVersion": "6.8.0-lab",
                "osImage": "Everstep lab",
                "containerRuntimeVersion": "lab://1",
                "kubeletVersion": "v1.36.3",
                "kubeProxyVersion": "",
                "operatingSystem": "linux",
                "architecture": "amd64",
            },
            "conditions": _conditions(ready_since, now),
        }
    }


def _conditions(ready_since: datetime, now: datetime) -> list[Object]:
    rows = (
        ("MemoryPressure", "False", "KubeletHasSufficientMemory", "memory is sufficient"),
        ("DiskPressure", "False", "KubeletHasNoDiskPressure", "there is no disk pressure"),
        ("PIDPressure", "False", "KubeletHasSufficientPID", "there are enough process ids"),
        ("Ready", "True", "KubeletReady", "kubelet is posting ready status"),
    )
    return [
        {
            "type": kind, "status": status, "reason": reason, "message": message,
            "lastHeartbeatTime": stamp(now), "lastTransitionTime": stamp(ready_since),
        }
        for kind, status, reason, message in rows
    ]  # fmt: skip


def build_lease(spec: NodeSpec, node_uid: str, now: datetime) -> Object:
    owner = {"apiVersion": "v1", "kind": "Node", "name": spec.name, "uid": node_uid}
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": spec.name, "ownerReferences": [owner]},
        "spec": {
            "holderIdentity": spec.name,
            "leaseDurationSeconds": LEASE_SECONDS,
            "renewTime": micro_stamp(now),
        },
    }


def exporter_ip(spec: NodeSpec) -> str:
    return f"{spec.pod_prefix}2"


def build_exporters() -> Object:
    """The exporters' DaemonSet, as in dcgm-exporter's own chart.

    Its pods are bound like any other pods. The node itself serves the exporter, see `node.py`.
    """
    labels = {"app.kubernetes.io/name": EXPORTER, "app": f"nvidia-{EXPORTER}"}
    container = {
        "name": f"nvidia-{EXPORTER}",
        "image": "nvcr.io/nvidia/k8s/dcgm-exporter:4.5.3-4.8.2-ubuntu22.04",
        "ports": [{"name": "metrics", "containerPort": EXPORTER_PORT}],
    }
    pod = {
        "containers": [container],
        "tolerations": [{"operator": "Exists"}],
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": EXPORTER, "namespace": EXPORTER_NAMESPACE, "labels": labels},
        "spec": {
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }


def is_exporter(pod: Object) -> bool:
    owners = pod["metadata"].get("ownerReferences") or ()
    ours = any((o["kind"], o["name"]) == ("DaemonSet", EXPORTER) for o in owners)
    return ours and pod["metadata"]["namespace"] == EXPORTER_NAMESPACE


def build_exporter_status(spec: NodeSpec, pod: Object, since: datetime) -> Object:
    ready = {"status": "True", "lastTransitionTime": stamp(since)}
    (container,) = pod["spec"]["containers"]
    return {
        "phase": "Running",
        "hostIP": spec.ip,
        "podIP": exporter_ip(spec),
        "podIPs": [{"ip": exporter_ip(spec)}],
        "startTime": stamp(since),
        "conditions": [
            {"type": kind, **ready}
            for kind in ("PodScheduled", "Initialized", "ContainersReady", "Ready")
        ],
        "containerStatuses": [
            {
                "name": container["name"], "image": container["image"],
                "imageID": "lab://dcgm-exporter", "containerID": "lab://dcgm-exporter",
                "ready": True, "started": True, "restartCount": 0,
                "state": {"running": {"startedAt": stamp(since)}},
            }
        ],
    }  # fmt: skip


def build_event(
    node: str, pod: Object, *, kind: str, reason: str, message: str, now: datetime
) -> Object:
    meta = pod["metadata"]
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": f"{meta['name']}.", "namespace": meta["namespace"]},
        "involvedObject": {
            "apiVersion": "v1", "kind": "Pod", "name": meta["name"],
            "namespace": meta["namespace"], "uid": meta["uid"],
        },
        "type": kind,
        "reason": reason,
        "message": message[:1024],
        "source": {"component": "kubelet", "host": node},
        "reportingComponent": "kubelet",
        "reportingInstance": node,
        "firstTimestamp": stamp(now),
        "lastTimestamp": stamp(now),
        "count": 1,
    }  # fmt: skip

"""The objects of the simulated cluster. Pure."""

from dataclasses import dataclass
from typing import Any

from everstep_contract import names

Object = dict[str, Any]
NAMESPACE = "default"
EXPORTER_PORT = 9400
GPUS = 8
WORKERS = 2
_PER_BLOCK = 250
_EXPORTERS, _WORKERS = 1, 64
"""Lowest third octet of the exporters' and the workers' addresses; the lab uses lower ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    jobs: int
    nodes: int

    def check(self) -> None:
        """Raise ValueError if the jobs do not fit on the nodes or there are too few addresses."""
        if self.jobs * WORKERS > self.nodes:
            raise ValueError(
                f"{self.jobs} jobs of {WORKERS} workers with {GPUS} GPUs each need "
                f"{self.jobs * WORKERS} nodes, and there are {self.nodes}"
            )
        if not 1 <= self.nodes <= _PER_BLOCK * (_WORKERS - _EXPORTERS):
            raise ValueError(f"{self.nodes} nodes: expected 1 to {_PER_BLOCK * 63}")


def exporter_address(network: int, number: int) -> str:
    return _address(network, _EXPORTERS, number)


def worker_address(network: int, number: int) -> str:
    return _address(network, _WORKERS, number)


def _address(network: int, block: int, number: int) -> str:
    return f"127.{network}.{block + number // _PER_BLOCK}.{number % _PER_BLOCK + 1}"


def node_name(number: int) -> str:
    return f"gpu-{number:03d}"


def job_name(number: int) -> str:
    return f"job-{number:03d}"


def build_node(number: int) -> Object:
    """A node with its status, as its kubelet registers it."""
    name = node_name(number)
    resources = {"cpu": "64", "memory": "512Gi", "pods": "110", "nvidia.com/gpu": str(GPUS)}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}},
        "status": {
            "capacity": resources,
            "allocatable": resources,
            "conditions": [build_ready("KubeletReady", "kubelet is posting ready status")],
            "nodeInfo": _node_info(name),
            "images": [{"names": [f"registry.example/{i}:1"], "sizeBytes": i} for i in range(50)],
        },
    }


def build_ready(reason: str, message: str) -> Object:
    return {"type": "Ready", "status": "True", "reason": reason, "message": message}


def _node_info(name: str) -> Object:
    texts = (
        "kernelVersion", "osImage", "containerRuntimeVersion", "kubeletVersion",
        "kubeProxyVersion", "operatingSystem", "architecture",
    )  # fmt: skip
    return {
        "machineID": name,
        "systemUUID": name,
        "bootID": f"{name}-1",
        **dict.fromkeys(texts, "simulated"),
    }


def build_job(number: int) -> Object:
    container = {
        "name": "trainer",
        "image": "simulated",
        "command": ["everstep", "run", "train.py"],
        "resources": {
            "requests": {"cpu": "8", "memory": "64Gi"},
            "limits": {"nvidia.com/gpu": GPUS, "memory": "64Gi"},
        },
    }
    return {
        "apiVersion": f"{names.GROUP}/{names.VERSION}",
        "kind": names.KIND,
        "metadata": {"name": job_name(number)},
        "spec": {
            "workers": {
                "replicas": WORKERS,
                "template": {"spec": {"containers": [container]}},
            },
            "checkpoint": {"uri": "s3://simulated/runs", "everySteps": 100},
        },
    }


def build_running(address: str, now: str, containers: list[str]) -> Object:
    """The status that a kubelet writes once all containers run."""
    condition_types = ("PodReadyToStartContainers", "Initialized", "ContainersReady", "Ready")
    return {
        "phase": "Running",
        "podIP": address,
        "podIPs": [{"ip": address}],
        "startTime": now,
        "conditions": [{"type": kind, "status": "True"} for kind in condition_types],
        "containerStatuses": [
            {
                "name": name,
                "image": "simulated",
                "imageID": "simulated",
                "ready": True,
                "started": True,
                "restartCount": 0,
                "state": {"running": {"startedAt": now}},
            }
            for name in containers
        ],
    }

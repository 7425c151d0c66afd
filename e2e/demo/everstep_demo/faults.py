"""Breaking the GPU that a certain pod holds."""

from collections.abc import Mapping
from typing import Any, Protocol

from everstep_demo.board import Pod


class Breakable(Protocol):
    """A cluster with simulated GPUs, of either kind."""

    def status(self) -> dict[str, Any]: ...

    def fault(self, node: str, **fields: Any) -> str: ...


def find_gpu(node: Mapping[str, Any], namespace: str, pod: str) -> int:
    """Index of the first GPU that the pod holds, from what the lab says of its node.

    Raises:
        LookupError: it holds none.
    """
    for gpu in node["gpus"]:
        if gpu["pod"] == pod and gpu.get("namespace", namespace) == namespace:
            return int(gpu["index"])
    held = {gpu["index"]: gpu["pod"] for gpu in node["gpus"]}
    raise LookupError(f"pod {pod} holds no GPU of its node; held are {held}")


def break_gpu(lab: Breakable, pod: Pod, xid: int, namespace: str = "default") -> str:
    """Plays the XID on the GPU that the pod holds; the lab's sentence about it."""
    node = lab.status()["nodes"][pod.node]
    return lab.fault(pod.node, gpu=find_gpu(node, namespace, pod.name), xid=xid)

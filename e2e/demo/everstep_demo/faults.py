"""Break the GPU that a given pod holds."""

from collections.abc import Mapping
from typing import Any, Protocol

from everstep_demo.board import Pod


class Breakable(Protocol):
    """A lab with simulated GPUs, local or on kind."""

    def status(self) -> dict[str, Any]: ...

    def fault(self, node: str, **fields: Any) -> str: ...


def find_gpu(node: Mapping[str, Any], namespace: str, pod: str) -> int:
    """Index of the first GPU that the pod holds, from the lab's description of its node.

    Raises:
        LookupError: the pod holds no GPU.
    """
    for gpu in node["gpus"]:
        if gpu["pod"] == pod and gpu.get("namespace", namespace) == namespace:
            return int(gpu["index"])
    held = {gpu["index"]: gpu["pod"] for gpu in node["gpus"]}
    raise LookupError(f"pod {pod} holds no GPU of its node; these pods hold GPUs: {held}")


def break_gpu(lab: Breakable, pod: Pod, xid: int, namespace: str = "default") -> str:
    """Inject the XID on the GPU that the pod holds; returns the lab's description."""
    node = lab.status()["nodes"][pod.node]
    return lab.fault(pod.node, gpu=find_gpu(node, namespace, pod.name), xid=xid)

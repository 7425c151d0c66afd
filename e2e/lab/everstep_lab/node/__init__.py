"""Simulated GPU nodes: their Kubernetes objects and processes are real, their GPUs are not."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from everstep_lab.node.node import SimulatedNode as SimulatedNode


def __getattr__(name: str) -> Any:
    """Import `SimulatedNode` on first use: the nodes of the kind lab do not need it."""
    if name == "SimulatedNode":
        from everstep_lab.node.node import SimulatedNode

        return SimulatedNode
    raise AttributeError(name)

"""The lab: a real Kubernetes cluster on one machine, with simulated GPUs.

Tests and the demo use it through two classes. `Lab` simulates the nodes and needs no root.
`KindLab` has real kubelets and containers and needs docker and kind. `everstep-lab` is the command
line.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from everstep_lab.client import Lab as Lab
    from everstep_lab.kind.client import KindLab as KindLab


def __getattr__(name: str) -> Any:
    """Import a class on first use: the guardian imports this package and must stay small."""
    if name == "Lab":
        from everstep_lab.client import Lab

        return Lab
    if name == "KindLab":
        from everstep_lab.kind.client import KindLab

        return KindLab
    raise AttributeError(name)

"""The lab: a real Kubernetes cluster on one machine, with simulated GPUs.

`Lab` (nodes simulated, no root) and `KindLab` (kubelets and containers real, needs docker and kind)
are its interface for tests and the demo; `everstep-lab` is its command line.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from everstep_lab.client import Lab as Lab
    from everstep_lab.kind.client import KindLab as KindLab


def __getattr__(name: str) -> Any:
    """Lazily, because the guardian imports this package and must stay small."""
    if name == "Lab":
        from everstep_lab.client import Lab

        return Lab
    if name == "KindLab":
        from everstep_lab.kind.client import KindLab

        return KindLab
    raise AttributeError(name)

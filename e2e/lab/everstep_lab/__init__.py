"""The lab: a real Kubernetes control plane on one machine, with simulated GPU nodes.

`Lab` is its interface for tests and the demo; `everstep-lab` the same for people.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from everstep_lab.client import Lab as Lab


def __getattr__(name: str) -> Any:
    """Lazily, because the guardian imports this package and must stay small."""
    if name == "Lab":
        from everstep_lab.client import Lab

        return Lab
    raise AttributeError(name)

"""The configuration of a lab: written by the process that starts it, read by the supervisor."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep_lab.places import NODES_MAX
from everstep_lab.seam import LabError

KIND_NODES = 3
"""Default number of worker nodes of a kind cluster. Each is a container with a kubelet."""

KIND_GRACE_SECONDS = 16
"""Real kubelets share the machine with training. With 8 s, a busy node would become NotReady."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LabConfig:
    nodes: int = 4
    gpus_per_node: int = 2
    kubeconfig: str = ""
    """An additional file for the administrator's kubeconfig. `down` removes it."""
    operator: bool = True
    operator_args: tuple[str, ...] = ()
    """Additional flags for `everstep-operator`, such as --cordon-budget=2."""
    node_grace_seconds: int = 8
    """The controller-manager's --node-monitor-grace-period. Kubernetes' default is 50."""
    seed: int = 0
    images: str = ""
    """The file that maps image names to folders. Empty means the lab's own `images.yaml`."""
    control_plane: str = ""
    """The folder with the control plane's binaries."""
    object_store: str = ""

    def check(self) -> None:
        """Raise LabError if a value is not allowed. Its message names the option."""
        if not 0 <= self.nodes <= NODES_MAX:
            raise LabError(f"--nodes {self.nodes}: expected 0 to {NODES_MAX}")
        if not 0 <= self.gpus_per_node <= 16:
            raise LabError(f"--gpus-per-node {self.gpus_per_node}: expected 0 to 16")
        if self.node_grace_seconds < 2:
            raise LabError(f"--node-grace-seconds {self.node_grace_seconds}: expected 2 or more")

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def read(cls, path: Path) -> "LabConfig":
        document: dict[str, Any] = json.loads(path.read_text())
        return cls(**document)

"""Names, ports and folders of the kind lab. Like the local lab's, they depend on its network."""

import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from everstep_lab.places import DEFAULT_NETWORK, Places

CONTROL_PLANE = "control-plane"
NAMESPACE = "everstep-lab"
EXPORTER_NAMESPACE = "kube-system"
"""The namespace in which the operator trusts exporters by default."""
STORE = "object-store"
STORE_PORT = 9000
STORE_NODE_PORT = 30900
PYTHON_TREE = "/opt/host-packages"
"""Mount path of the host's Python packages on worker nodes and in containers with a GPU."""
NODE_FOLDER = "/var/lib/everstep-lab"
"""Folder on a node for the state of its faults, the socket for requests and the store's data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KindPlaces:
    cluster: str
    """Name of the kind cluster, and prefix of its node containers' names."""
    root: Path

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> "KindPlaces":
        network = Places.from_env(environ).network
        suffix = "" if network == DEFAULT_NETWORK else f"-{network}"
        name = f"everstep-lab-{os.getuid()}-kind{suffix}"
        return cls(cluster=f"everstep{suffix}", root=Path(tempfile.gettempdir()) / name)

    @property
    def kubeconfig(self) -> Path:
        return self.root / "kubeconfig"

    @property
    def described(self) -> Path:
        return self.root / "lab.json"

    @property
    def ca(self) -> Path:
        return self.root / "ca.crt"

    @property
    def control_plane(self) -> str:
        return f"{self.cluster}-{CONTROL_PLANE}"

    def worker(self, index: int) -> str:
        """kind's name of a worker: everstep-worker, everstep-worker2, …"""
        return f"{self.cluster}-worker{index if index > 1 else ''}"


def choose_node(places: KindPlaces, count: int, name: str) -> str | None:
    """Find a worker by its name in kind or in the local lab (`node-2`). None: there is none."""
    workers = [places.worker(index) for index in range(1, count + 1)]
    if match := re.fullmatch(r"node-([1-9]\d*)", name):
        index = int(match[1])
        return workers[index - 1] if index <= count else None
    return name if name in workers else None

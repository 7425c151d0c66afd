"""The files and addresses of a lab. All are derived from the number of its network.

One lab can run per network. The default is 64: node *n* is 127.64.0.n, its pods are 127.64.n.x.
"""

import os
import re
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from everstep_lab.seam import LabError

DEFAULT_NETWORK = 64
NODES_MAX = 200
LOCK = "lock"
_SHM = Path("/dev/shm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """`root` is a folder on disk. `memory` is on tmpfs if there is one. `down` removes both."""

    network: int
    root: Path
    memory: Path

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> "Places":
        """EVERSTEP_LAB_NETWORK (64 to 95) selects the network, so that a second lab can run."""
        raw = environ.get("EVERSTEP_LAB_NETWORK", str(DEFAULT_NETWORK))
        # Network 96 is used for Services.
        if not raw.isascii() or not raw.isdigit() or not 64 <= int(raw) < 96:
            raise LabError(f"EVERSTEP_LAB_NETWORK={raw}: expected a number from 64 to 95")
        suffix = "" if int(raw) == DEFAULT_NETWORK else f"-{raw}"
        name = f"everstep-lab-{os.getuid()}{suffix}"
        root = Path(tempfile.gettempdir()) / name
        memory = (_SHM if os.access(_SHM, os.W_OK) else root) / (
            name if _SHM.exists() else "memory"
        )
        return cls(network=int(raw), root=root, memory=memory)

    @property
    def lock(self) -> Path:
        return self.root / LOCK

    @property
    def socket(self) -> Path:
        return self.root / "control.sock"

    @property
    def kubeconfig(self) -> Path:
        return self.root / "kubeconfig"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def certs(self) -> Path:
        return self.root / "certs"

    @property
    def nodes(self) -> Path:
        return self.root / "nodes"

    def node_ip(self, index: int) -> str:
        return f"127.{self.network}.0.{index}"

    def pod_prefix(self, index: int) -> str:
        return f"127.{self.network}.{index}."

    @property
    def control_ip(self) -> str:
        """The address of etcd and the API server."""
        return f"127.{self.network}.0.251"

    @property
    def store_ip(self) -> str:
        return f"127.{self.network}.0.250"

    @property
    def operator_ip(self) -> str:
        return f"127.{self.network}.0.249"


def choose_port(ip: str, preferred: int) -> int:
    """Return the preferred port if it is free on `ip`, else one that the kernel assigns."""
    for port in (preferred, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((ip, port))
            except OSError:
                continue
            chosen: int = probe.getsockname()[1]
            return chosen
    raise LabError(
        f"no free port on {ip}: is this Linux, with the whole of 127.0.0.0/8 on loopback?"
    )


def is_node_name(name: str) -> bool:
    return re.fullmatch(r"node-[1-9][0-9]*", name) is not None

"""What the cluster side of the lab and its node side (pods, exporter) share.

The supervisor makes a `NodeSpec` and a `Cluster` for each node and runs one `Node` for it, all in
its own asyncio loop.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class LabError(Exception):
    """Something that the person at the terminal can act on: what was found, and what to do."""


class BadRequestError(LabError):
    """A fault that cannot be played: names the value and what is possible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    """One simulated GPU node. Its processes bind only `ip` and addresses under `pod_prefix`."""

    index: int
    """From 1."""
    name: str
    """`node-1`, …"""
    ip: str
    """InternalIP, for example 127.64.0.1; the kubelet port is 10250 on it."""
    pod_prefix: str
    """`127.64.1.` with the dot: pods get .10 to .254, .2 is the exporter's."""
    gpus: int
    token: str
    """Bearer token of the user `system:node:<name>` in group `system:nodes`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What a node needs to know of its cluster. All folders exist; `down` removes them."""

    api_url: str
    ca_file: Path
    """CA of the API server's certificate and of the nodes' serving certificates."""
    admin_token: str
    """A system:masters token, for what a DaemonSet or an administrator would do."""
    certs: Path
    """Serving certificates of nodes: `<node name>.crt` and `<node name>.key`."""
    state: Path
    """On disk: one sub-folder per node, named after it, is the node's to make."""
    memory: Path
    """On tmpfs: likewise, for volumes of medium Memory."""
    images: Path
    """The file that maps image names to a folder and an interpreter."""
    logs: Path
    """For what the lab itself logs."""
    seed: int = 0
    """Of everything that is drawn by chance: UUIDs, delays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRequest:
    """`everstep-lab fault NODE …`, as typed."""

    gpu: int | None = None
    xid: int | None = None
    exporter: str | None = None
    """What the node side offers: silent, http500, refused, …; `BadRequestError` names them."""
    kill_node: bool = False
    partition: bool = False


class Node(Protocol):
    """`everstep_lab.node.SimulatedNode(spec, cluster, scenario)`."""

    async def run(self) -> None:
        """Register, then live until `stop` or cancellation. An exception takes the lab down."""

    async def stop(self) -> None:
        """End every process of the node, close its servers; returns when nothing is left."""

    async def fault(self, request: FaultRequest) -> str:
        """Start the fault; returns a sentence that says what was done. Raises `BadRequestError`."""

    async def heal(self) -> str:
        """Undo every fault of this node as a repair and a reboot would; returns what was done."""

    def describe(self) -> dict[str, object]:
        """For `everstep-lab status`: plain JSON values (faults in force, pods, GPUs)."""

"""What the cluster side of the lab and its node side (pods, exporter) share.

The supervisor makes a `NodeSpec` and a `Cluster` for each node and runs one `Node` for it, all in
its own asyncio loop.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from everstep_lab.api import Api


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
    freeze_node: bool = False
    """Every process of the node stands still and comes back later; kind only."""

    @property
    def asks_for_node(self) -> bool:
        return self.kill_node or self.partition or self.freeze_node


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


class RunningLab(Protocol):
    """What `Lab` (local) and `KindLab` both offer; every method that fails raises `LabError`."""

    described: dict[str, Any]
    """What `up` found out; `status` as of then."""

    def up(self) -> None: ...
    def down(self) -> str: ...

    def status(self) -> dict[str, Any]:
        """As of now: nodes with GPUs and faults, object store, operator."""

    @property
    def nodes(self) -> Sequence[str]:
        """Names of the GPU nodes."""

    def fault(self, node: str, **fields: Any) -> str:
        """Fields of `FaultRequest`; returns a sentence that says what was done."""

    def heal(self, node: str) -> str:
        """Undo every fault of this node; returns what was done."""

    def operator_start(self) -> str: ...
    def operator_stop(self) -> str: ...
    def operator_kill(self) -> str: ...
    def operator_restart(self) -> str: ...
    def operator_logs(self) -> str: ...
    def objectstore_stop(self) -> str: ...
    def objectstore_start(self) -> str: ...

    @property
    def kubeconfig(self) -> Path: ...

    @property
    def store_environment(self) -> Mapping[str, str]:
        """AWS_…: what a client on this machine needs to reach the S3 server."""

    def api(self) -> "Api":
        """A client with the administrator's rights, for the running event loop; close it."""

    def kubectl(
        self, *arguments: str, stdin: str | None = None, check: bool = True, timeout: float = 60.0
    ) -> str:
        """Standard output; with `check=False` standard error as well, and no exception."""

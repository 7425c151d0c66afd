"""Types that the cluster side of the lab and its node side (pods, exporter) share.

The supervisor creates one `Cluster`, and for each node a `NodeSpec` and a `Node`. All nodes run in
the supervisor's asyncio loop.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from everstep_lab.api import Api


class LabError(Exception):
    """An error for the user at the terminal. The message states what was found and what to do."""


class BadRequestError(LabError):
    """A fault that cannot be injected. The message names the bad value and the possible ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    """One simulated GPU node. Its processes bind only `ip` and addresses under `pod_prefix`."""

    index: int
    """Counted from 1."""
    name: str
    """`node-1`, …"""
    ip: str
    """The InternalIP, for example 127.64.0.1. The kubelet listens on its port 10250."""
    pod_prefix: str
    """For example `127.64.1.`, with the dot. Pods get .10 to .254; .2 is the exporter's address."""
    gpus: int
    token: str
    """Bearer token of the user `system:node:<name>` in the group `system:nodes`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What a node needs to know about its cluster. All folders exist; `down` removes them."""

    api_url: str
    ca_file: Path
    """The CA of the API server's certificate and of the nodes' serving certificates."""
    admin_token: str
    """A token of the group system:masters, for actions of a DaemonSet or an administrator."""
    certs: Path
    """Folder of the nodes' serving certificates: `<node name>.crt` and `<node name>.key`."""
    state: Path
    """Folder on disk. Each node makes a sub-folder with its name."""
    memory: Path
    """Folder on tmpfs, with a sub-folder per node, for volumes of medium Memory."""
    images: Path
    """The file that maps image names to a folder and an interpreter."""
    logs: Path
    """Folder of the lab's own logs."""
    seed: int = 0
    """Seed of the GPUs' UUIDs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRequest:
    """The options of `everstep-lab fault NODE …`."""

    gpu: int | None = None
    xid: int | None = None
    exporter: str | None = None
    """A mode of the exporter: silent, http500, refused, …; `BadRequestError` lists them."""
    kill_node: bool = False
    partition: bool = False
    freeze_node: bool = False
    """Freeze every process of the node until `heal`; only with kind."""

    @property
    def asks_for_node(self) -> bool:
        return self.kill_node or self.partition or self.freeze_node


class Node(Protocol):
    """The interface of `everstep_lab.node.SimulatedNode(spec, cluster, scenario)`."""

    async def run(self) -> None:
        """Register the node, then run until `stop` or cancellation. An exception ends the lab."""

    async def stop(self) -> None:
        """End every process of the node and close its servers. Returns when all have ended."""

    async def fault(self, request: FaultRequest) -> str:
        """Inject the fault and return a sentence on what was done. Raises `BadRequestError`."""

    async def heal(self) -> str:
        """Undo every fault of this node, like a repair and a reboot. Returns what was done."""

    def describe(self) -> dict[str, object]:
        """The node's state for `everstep-lab status`, as JSON values: faults, pods and GPUs."""


class RunningLab(Protocol):
    """The common interface of `Lab` (local) and `KindLab`. Methods that fail raise `LabError`."""

    described: dict[str, Any]
    """The description of the lab at the end of `up`."""

    def up(self) -> None: ...
    def down(self) -> str: ...

    def status(self) -> dict[str, Any]:
        """The current state: nodes with GPUs and faults, object store, operator."""

    @property
    def nodes(self) -> Sequence[str]:
        """Names of the GPU nodes."""

    def fault(self, node: str, **fields: Any) -> str:
        """Inject a fault, given as `FaultRequest` fields. Returns a sentence on what was done."""

    def heal(self, node: str) -> str:
        """Undo every fault of this node. Returns what was done."""

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
        """The AWS_… environment variables for an S3 client on this machine."""

    def api(self) -> "Api":
        """A client with administrator rights, for the running event loop. The caller closes it."""

    def kubectl(
        self, *arguments: str, stdin: str | None = None, check: bool = True, timeout: float = 60.0
    ) -> str:
        """Run `kubectl` and return its standard output.

        With `check=False`, it also returns standard error, and a failure raises no exception.
        """

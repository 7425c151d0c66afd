"""How the ranks of an epoch find each other: each receives the endpoints of all others. Then they
connect (`mesh.py`), and exchange gloo's addresses over these connections.

After a loss the endpoints come with what the agents exchange anyway (`wire.Standing`,
`wire.Regroup`); otherwise in one request to the agents. A message between ranks takes less than a
millisecond. A request to the agents takes 2 to 25 just after a loss, because the agents compete
with the ranks for the cores.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from everstep import mesh
from everstep.mesh import Listener, Look, Mesh


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the other ranks reach this one to form a group. It serves one meeting."""

    way: str
    """How this rank wishes to form the group; one word."""
    listener: Listener | None
    """None: it has no connections of its own to other ranks."""

    @property
    def text(self) -> str:
        """What the other ranks receive."""
        return f"{self.way} {self.listener.entry if self.listener else ''}"

    def close(self) -> None:
        if self.listener is not None:
            self.listener.close()


@dataclass(frozen=True, slots=True)
class Met:
    """What a rank knows once all have met."""

    way: str
    """How to form the group: the wish of rank 0."""
    mesh: Mesh | None
    """The connections to the other ranks; None: there are none."""


def listen(world: int, address: str | None, way: str) -> Endpoint:
    """Open this rank's endpoint.

    Args:
        address: IP address of this pod; None: this rank knows none.

    Raises:
        RuntimeError: `address` is not of this pod.
    """
    return Endpoint(way, mesh.listen(world, address))


def meet(rank: int, own: Endpoint, texts: Sequence[str], look: Look = lambda: None) -> Met:
    """Connect to the other ranks; blocks until all are there.

    Args:
        texts: the endpoints of all ranks (`Endpoint.text`), by rank.
        look: called while this rank waits for others to connect. What it raises ends the wait.

    Raises:
        RuntimeError: a rank was lost meanwhile.
    """
    all_ranks = [text.split(" ", 1) for text in texts]
    entries = [entry for _, entry in all_ranks]
    return Met(all_ranks[0][0], mesh.connect(rank, entries, own.listener, look))


class MeshStore(dist.Store):  # type: ignore[name-defined,misc]
    """The store in which gloo's ranks leave their addresses: each sets its own key, and then waits
    for those of all others. So a rank that waits sends what it has set, and receives what the
    others have. Torch must not ask it for anything else.

    Args:
        limit: how long all ranks may take to come here.
    """

    def __init__(self, connections: Mesh, limit: timedelta, look: Look = lambda: None) -> None:
        super().__init__()
        self._mesh, self._until = connections, time.monotonic() + limit.total_seconds()
        self._look = look
        self._unsent: dict[str, str] = {}
        self._known: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        raw = value.encode() if isinstance(value, str) else bytes(value)
        self._known[key], self._unsent[key] = raw, raw.hex()

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._known[key]

    def wait(self, keys: Sequence[str], limit: timedelta | None = None) -> None:
        while any(key not in self._known for key in keys):
            self._exchange()

    def _exchange(self) -> None:
        """Raises `RuntimeError` if a rank is lost, or takes too long."""
        unsent, self._unsent = self._unsent, {}
        self._mesh.send(json.dumps(unsent).encode())
        found = self._mesh.receive(self._check)
        if found is None:
            raise RuntimeError("a rank was lost while the group was formed")
        for keys in map(json.loads, found.values()):
            self._known |= {key: bytes.fromhex(value) for key, value in keys.items()}

    def _check(self) -> None:
        self._look()
        if time.monotonic() > self._until:
            raise RuntimeError("a rank took too long while the group was formed")

"""How the ranks of an epoch find each other. Each gives its address to all others, in one request to
the agents; then they connect (`mesh.py`), and exchange gloo's addresses over these connections.

A message between ranks takes less than a millisecond. A request to the agents takes 2 to 15 just
after a loss, because the agents compete with the ranks for the cores.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from everstep import mesh
from everstep.mesh import Look, Mesh
from everstep.store import AgentStore

_KEY = "meet"


@dataclass(frozen=True, slots=True)
class Met:
    """What a rank knows once all have met."""

    way: str
    """How to form the group: the wish of rank 0."""
    mesh: Mesh | None
    """The connections to the other ranks; None: there are none."""


def meet(
    keys: AgentStore,
    rank: int,
    world: int,
    *,
    address: str | None,
    way: str,
    look: Look = lambda: None,
) -> Met:
    """Meet the other ranks; blocks until all are there.

    Args:
        keys: the epoch's rendezvous store.
        address: IP address of this pod; None: this rank knows none.
        way: how this rank wishes to form the group; one word.
        look: called while this rank waits for others to connect. What it raises ends the wait.

    Raises:
        RuntimeError: the epoch is over, or a rank was lost meanwhile, or `address` is not of this pod.
        TimeoutError: a rank did not come.
    """
    listener = mesh.listen(world, address)
    own = f"{way} {listener.entry if listener else ''}"
    all_ranks = [one.split(" ", 1) for one in keys.all_gather(_KEY, rank, world, own)]
    entries = [entry for _, entry in all_ranks]
    return Met(all_ranks[0][0], mesh.connect(rank, entries, listener, look))


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

"""The interface to a store: six operations on keys relative to one run.

Everything above it works on any store that passes the suite `tests/agent/test_storage.py`.
"""

from collections.abc import Callable
from typing import Protocol, TypeVar

SLOWEST = 2**19
"""Bytes a second. A connection that is at least as fast as this can write and read chunks of 64 MiB."""
DAMAGED_READS = 2
"""How often an object is read before it counts as damaged: the damage may have occurred on its way here."""


class Sink(Protocol):
    """Takes an object piece by piece, as a hash object does."""

    def update(self, data: bytes | memoryview, /) -> object: ...


S = TypeVar("S", bound=Sink)


class ObjectStore(Protocol):
    """Every method may raise `Unreachable`, `Denied`, `BucketMissing` or another `StoreError`."""

    @property
    def uri(self) -> str:
        """The address of the store, for messages."""

    async def put(self, key: str, body: bytes | memoryview) -> None:
        """Write, whether or not the key exists."""

    async def create(self, key: str, body: bytes | memoryview) -> None:
        """Write only if the key does not exist. Of several writers exactly one succeeds.

        Raises:
            AlreadyExists: also when an earlier try of ours succeeded and its answer was lost.
            Unreachable: the outcome is not known.
        """

    async def get(self, key: str) -> bytes:
        """The whole object, at most 64 MiB by convention of the writers. Raises `NotFound`."""

    async def stream(
        self, key: str, begin: Callable[[], S], *, urgent: bool = False
    ) -> tuple[int, S]:
        """Read the object piece by piece, which takes less CPU time and memory than `get`.

        Args:
            begin: returns the sink for the pieces; called again if the object is read again. The
                sink's `update` runs in another thread and must not raise.
            urgent: a step waits for it; otherwise ranks go first where all cores are busy.

        Returns the object's size in bytes, and the sink that has all of it. Raises `NotFound`.
        """

    async def list(self, prefix: str = "", *, after: str = "") -> list[str]:
        """The keys below the folder `prefix` that sort after the key `after`, sorted; the list may be
        stale and proves nothing.
        """

    async def delete(self, key: str) -> None:
        """Afterwards the key does not exist; no error if it did not exist before."""

"""The interface to a store: six operations on keys relative to one run.

Everything above it works on any store that passes the suite `tests/agent/test_storage.py`.
"""

from collections.abc import Callable
from typing import Protocol


class Hash(Protocol):
    """A hash object, as in hashlib and blake3."""

    def update(self, data: bytes | memoryview, /) -> object: ...
    def hexdigest(self) -> str: ...


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

    async def hash(self, key: str, begin: Callable[[], Hash]) -> tuple[int, Hash]:
        """The object's size in bytes, and its hash, computed with the hash object from `begin`.

        The object is read piece by piece, which takes less CPU time than `get`. Raises `NotFound`.
        """

    async def list(self, prefix: str = "") -> list[str]:
        """The keys below the folder `prefix`, sorted; the list may be stale and proves nothing."""

    async def delete(self, key: str) -> None:
        """Afterwards the key does not exist; no error if it did not exist before."""

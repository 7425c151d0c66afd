"""Where a checkpoint's chunks may be, the nearest place first: this pod's memory, a disk of its
node, other pods' memory, the store. Each chunk is verified by its digest, wherever it comes from,
so a tier with wrong content does no harm.
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Protocol, TypeVar

from everstep_agent.checkpoint import digest
from everstep_agent.checkpoint.keeping import Save
from everstep_agent.checkpoint.manifests import Broken
from everstep_agent.storage.errors import BadAddress, NotFound, TooLarge
from everstep_agent.storage.store import DAMAGED_READS, ObjectStore
from everstep_contract.manifest import Chunk

H = TypeVar("H", bound=digest.Hash)


class Tier(Protocol):
    """Every tier passes the suite `tests/agent/test_tiers.py`."""

    @property
    def name(self) -> str:
        """For the log."""

    async def get(self, chunk: Chunk) -> bytes | None:
        """The chunk's bytes, not verified yet; None: this tier does not hold it.

        Raises:
            Broken: this tier is the last that could have held it, and what it has is unusable.
            StoreError: this tier must be waited for.
        """

    async def put(self, chunk: Chunk, body: bytes) -> None:
        """Hold a chunk, completely or not at all.

        Raises:
            OSError, StoreError: it is not held, because there is no room, or the tier is read-only
                or cannot be reached.
        """


class NearTier(Tier, Protocol):
    """A tier that has no room for everything. It holds what its owners say that they need
    (`keeping`). From the store, chunks are deleted only by the run log's retention.
    """

    async def list(self) -> Collection[str]:
        """The digests of the chunks that it holds. Raises OSError if it cannot tell."""

    async def keep(self, owner: str, saves: Sequence[Save], since: int) -> None:
        """`owner` needs these saves, too. To be called before the `put` of their chunks.

        Nobody needs saves older than step `since`, the newest commit. What nobody needs is deleted.
        Raises OSError.
        """

    async def drop(self, owner: str) -> None:
        """`owner` needs nothing any more. Raises OSError."""


class StoreTier:
    """The object store: the last tier. What it lacks is lost."""

    name = "store"

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    async def get(self, chunk: Chunk) -> bytes | None:
        try:
            return await self._store.get(chunk.key)
        except NotFound:
            return None
        except (BadAddress, TooLarge) as error:
            raise Broken(str(error)) from None

    async def put(self, chunk: Chunk, body: bytes | memoryview) -> None:
        await self._store.put(chunk.key, body)

    async def check(self, chunk: Chunk) -> None:
        """Verify a chunk in the store, without keeping it in memory. Raises as `stream`."""
        await self.stream(chunk, partial(digest.begin, chunk.digest))

    async def stream(self, chunk: Chunk, begin: Callable[[], H], *, urgent: bool = False) -> H:
        """Read a chunk piece by piece and verify it. The arguments are those of
        `ObjectStore.stream`. Returns the sink, which also hashes what it gets.

        Raises:
            Broken: the chunk is gone, or does not match its digest.
            StoreError: the store cannot be read.
        """
        problem = ""
        for _ in range(DAMAGED_READS):
            try:
                count, found = await self._store.stream(chunk.key, begin, urgent=urgent)
            except NotFound:
                raise Broken(f"{chunk.key} is gone") from None
            except (BadAddress, TooLarge) as error:
                raise Broken(str(error)) from None
            if not (problem := _compare(chunk, count, found)):
                return found
        raise Broken(problem)


def find_problem(chunk: Chunk, body: bytes | bytearray | None) -> str:
    """Why `body` is not this chunk; empty: it is."""
    if body is None:
        return f"{chunk.key} is gone"
    found = digest.begin(chunk.digest)
    found.update(memoryview(body))
    return _compare(chunk, len(body), found)


def _compare(chunk: Chunk, count: int, found: digest.Hash) -> str:
    if count != chunk.bytes:
        return f"{chunk.key} has {count} bytes, not {chunk.bytes}"
    differs = digest.find_difference(found, chunk.digest)
    return f"{chunk.key} is corrupt: {differs}" if differs else ""

"""Where a checkpoint's chunks may be found, the nearest place first: this pod's memory, other pods' memory, the
store. Each chunk is verified by its digest, wherever it comes from; so a tier may be wrong, but cannot do harm.
"""

from typing import Protocol

from everstep_agent.checkpoint import digest
from everstep_agent.checkpoint.manifests import Broken
from everstep_agent.storage.errors import BadAddress, NotFound, TooLarge
from everstep_agent.storage.store import ObjectStore
from everstep_contract.manifest import Chunk


class Tier(Protocol):
    @property
    def name(self) -> str:
        """For the log."""

    async def get(self, chunk: Chunk) -> bytes | None:
        """Its bytes, not verified yet; None: this tier does not hold it.

        Raises:
            Broken: this tier is the last that could have held it, and what it has is unusable.
            StoreError: this tier must be waited for.
        """


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


def find_problem(chunk: Chunk, body: bytes | None) -> str:
    """Why `body` is not that chunk; empty: it is."""
    if body is None:
        return f"{chunk.key} is gone"
    if len(body) != chunk.bytes:
        return f"{chunk.key} has {len(body)} bytes, not {chunk.bytes}"
    differs = digest.find_difference(body, chunk.digest)
    return f"{chunk.key} is corrupt: {differs}" if differs else ""

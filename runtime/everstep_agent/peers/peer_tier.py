"""The memory of another pod as a tier. What that pod has staged, restored or copied need not be
read from the store, and what it holds for this pod survives the loss of this pod's node.
"""

import errno
from collections.abc import Collection, Sequence
from typing import Any

from everstep_agent.checkpoint.keeping import Save
from everstep_agent.peers import incoming
from everstep_agent.peers.answering import Handler
from everstep_agent.peers.budget import Budget
from everstep_agent.peers.client import PeerError, Pool
from everstep_agent.peers.tier_messages import (
    ChunkCall,
    DropCall,
    KeepCall,
    ListCall,
    PieceCall,
    TierAnswer,
)
from everstep_contract.manifest import Chunk

READ_PATH, TAKE_PATH = "/v1/chunk", "/v1/chunk-piece"
LIST_PATH, KEEP_PATH, DROP_PATH = "/v1/chunks-held", "/v1/chunks-kept", "/v1/chunks-dropped"
SENT_BYTES = 2**20
"""The most bytes in one request, so that a copy is spread over the time that its budget allows."""
CALL_SECONDS = 5.0
"""Limit of one request. A peer that does not answer is not asked for a chunk again."""


class PeerTier:
    """
    Args:
        owner: the name under which this pod sends chunks.
        budget: limits how fast this pod sends them; None: no limit.
    """

    name = "peer"

    def __init__(
        self, pool: Pool, address: str, owner: str = "", budget: Budget | None = None
    ) -> None:
        self.address = address
        self._pool, self._owner, self._budget = pool, owner, budget
        self._silent = False

    async def get(self, chunk: Chunk) -> bytes | None:
        if self._silent:
            return None
        try:
            return await self._fetch(chunk)
        except PeerError:
            self._silent = True
            return None

    async def put(self, chunk: Chunk, body: bytes) -> None:
        for start in range(0, max(1, len(body)), SENT_BYTES):
            piece = memoryview(body)[start : start + SENT_BYTES]
            if self._budget is not None:
                await self._budget.take(len(piece))
            call = PieceCall(owner=self._owner, chunk=chunk, start=start)
            await self._ask(TAKE_PATH, incoming.pack(call, piece))

    async def list(self) -> Collection[str]:
        return frozenset((await self._ask(LIST_PATH, ListCall())).digests)

    async def keep(self, owner: str, saves: Sequence[Save], since: int) -> None:
        await self._ask(KEEP_PATH, KeepCall(owner=owner, saves=tuple(saves), since=since))

    async def drop(self, owner: str) -> None:
        await self._ask(DROP_PATH, DropCall(owner=owner))

    async def _ask(self, path: str, body: Any) -> TierAnswer:
        """The answer. Raises OSError: the other pod has failed to do it, or does not answer."""
        try:
            found = await self._pool.call(
                self.address, path, body, TierAnswer, timeout=CALL_SECONDS
            )
        except PeerError as error:
            raise ConnectionError(errno.ECONNREFUSED, str(error)) from None
        if found.error:
            raise OSError(found.error, found.message, self.address)
        return found

    async def _fetch(self, chunk: Chunk) -> bytes | None:
        """Raises `PeerError`."""
        pieces: list[bytes] = []
        for start in range(0, max(1, chunk.bytes), incoming.PIECE_BYTES):
            count = min(incoming.PIECE_BYTES, chunk.bytes - start)
            call = ChunkCall(digest=chunk.digest, start=start, count=count)
            piece = await self._pool.fetch(self.address, READ_PATH, call, timeout=CALL_SECONDS)
            pieces.append(piece)
            if len(piece) < count:
                break
        return b"".join(pieces) or None


def build_routes(served: incoming.Incoming) -> dict[str, Handler]:
    return {
        READ_PATH: served.read,
        TAKE_PATH: served.take,
        LIST_PATH: served.list,
        KEEP_PATH: served.keep,
        DROP_PATH: served.drop,
    }


def choose_order(addresses: Sequence[str], own: str) -> list[str]:
    """The other pods, beginning with those after this one in the order of slots. So pods that
    restore at the same time ask different pods first.
    """
    if own not in addresses:
        return list(addresses)
    at = addresses.index(own)
    return [*addresses[at + 1 :], *addresses[:at]]

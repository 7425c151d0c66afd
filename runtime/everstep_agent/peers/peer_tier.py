"""The memory of the other pods, as a tier: what they staged or restored need not be read from the store."""

import asyncio
from collections.abc import Sequence

from everstep_agent.checkpoint.memory_tier import MemoryTier
from everstep_agent.peers.client import PeerError, Pool
from everstep_agent.peers.messages import ChunkCall
from everstep_contract.manifest import Chunk

PATH = "/v1/chunk"
PEERS = 16
"""How many pods are asked at most; what none of them holds is read from the store."""
PIECE_BYTES = 4 * 2**20
"""In one answer: to sign it takes the sender's loop a few milliseconds."""
CALL_SECONDS = 5.0
"""Limit of one question; a peer that does not answer is not asked again."""


class PeerTier:
    """`addresses`: of the other pods, those to be asked first in front."""

    name = "peer"

    def __init__(self, pool: Pool, addresses: Sequence[str]) -> None:
        self._pool = pool
        self._addresses = list(addresses[:PEERS])

    async def get(self, chunk: Chunk) -> bytes | None:
        for address in list(self._addresses):
            try:
                body = await self._fetch(address, chunk)
            except PeerError:
                if address in self._addresses:
                    self._addresses.remove(address)
                continue
            if body is not None:
                return body
        return None

    async def _fetch(self, address: str, chunk: Chunk) -> bytes | None:
        """Raises `PeerError`."""
        pieces: list[bytes] = []
        for start in range(0, max(1, chunk.bytes), PIECE_BYTES):
            call = ChunkCall(digest=chunk.digest, start=start, count=PIECE_BYTES)
            piece = await self._pool.fetch(address, PATH, call, timeout=CALL_SECONDS)
            if not piece:
                return None
            pieces.append(piece)
        return b"".join(pieces)


async def answer_call(memory: MemoryTier, call: ChunkCall) -> bytes:
    """The other pod's half: the bytes, none if it does not hold the chunk."""
    count = min(call.count, PIECE_BYTES)
    if call.start < 0 or count <= 0:
        return b""
    return await asyncio.to_thread(memory.read, call.digest, call.start, count) or b""


def choose_order(addresses: Sequence[str], own: str) -> list[str]:
    """The other pods, those behind this one in the order of slots first: so pods that restore together ask
    different ones.
    """
    if own not in addresses:
        return list(addresses)
    at = addresses.index(own)
    return [*addresses[at + 1 :], *addresses[:at]]

"""This pod's memory as a tier for other pods: they read its chunks, and send it copies."""

import asyncio
import contextlib
import errno
import os
import shutil
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from everstep_agent.checkpoint.folder_tier import FolderTier
from everstep_agent.checkpoint.memory_tier import MemoryTier
from everstep_agent.checkpoint.tiers import find_problem
from everstep_agent.peers.tier_messages import (
    ChunkCall,
    DropCall,
    KeepCall,
    ListCall,
    PieceCall,
    TierAnswer,
)
from everstep_contract import codec
from everstep_contract.manifest import LIMIT_BYTES

PIECE_BYTES = 4 * 2**20
"""The most bytes in one answer. Signing them takes the sender's loop a few milliseconds."""
RESERVE_BYTES = 16 * 2**20
"""Copies leave this much of the memory for documents and positions."""
SENDERS = 16
"""How many pods may be in the middle of a chunk. Beyond that, the oldest incomplete chunk is
dropped, because its pod may be gone.
"""
GIVEN_UP_SECONDS = 300.0
"""An incomplete chunk of which no piece has arrived for this long is dropped: its pod is gone, or sends its saves to
another pod by now.
"""
LIST_SECONDS = 2.0
"""Limit for the disk to list its chunks. After it, only those in memory are listed. Less than the limit of the pod
that asks.
"""
END = b"\n"


@dataclass(slots=True)
class Arriving:
    """A chunk that another pod is sending."""

    digest: str
    at: float
    """When its last piece arrived."""
    body: bytearray = field(default_factory=bytearray)


class Incoming:
    """
    Args:
        memory: holds the copies.
        disk: another tier of this pod that the others may read. If it fails or hangs, they still get what is in
            memory.
    """

    def __init__(
        self,
        memory: MemoryTier,
        disk: FolderTier | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._memory, self._disk, self._clock = memory, disk, clock
        self._arriving: dict[str, Arriving] = {}
        """By owner."""

    async def read(self, raw: bytes) -> bytes:
        """The bytes that a `ChunkCall` asks for; none if the chunk is not held."""
        call = codec.loads(ChunkCall, raw)
        count = min(call.count, PIECE_BYTES)
        if call.start < 0 or count <= 0:
            return b""
        span = call.digest, call.start, count
        body = await asyncio.to_thread(self._memory.read, *span)
        if body is None and self._disk is not None:
            with contextlib.suppress(OSError):
                body = await self._disk.run(count, self._disk.read, *span)
        return body or b""

    async def take(self, raw: bytes) -> bytes:
        """Take one piece of a chunk (`PieceCall`)."""
        end = raw.find(END) if END in raw else len(raw)
        body = memoryview(raw)[end + len(END) :]
        return await _answer(self._take(codec.loads(PieceCall, raw[:end]), body))

    async def keep(self, raw: bytes) -> bytes:
        call = codec.loads(KeepCall, raw)
        return await _answer(self._memory.keep(call.owner, call.saves, call.since))

    async def drop(self, raw: bytes) -> bytes:
        return await _answer(self._memory.drop(codec.loads(DropCall, raw).owner))

    async def list(self, raw: bytes) -> bytes:
        codec.loads(ListCall, raw)
        found = set(await self._memory.list())
        if self._disk is not None:
            with contextlib.suppress(OSError):
                async with asyncio.timeout(LIST_SECONDS):
                    found |= set(await self._disk.list())
        return codec.dumps(TierAnswer(digests=tuple(sorted(found))))

    async def _take(self, call: PieceCall, body: memoryview) -> None:
        chunk = call.chunk
        if call.start == 0:
            self._check_room(chunk.bytes)
            self._begin(call.owner, chunk.digest)
        held = self._arriving.get(call.owner)
        if held is None or held.digest != chunk.digest or len(held.body) != call.start:
            raise OSError(errno.EAGAIN, "a piece is missing: send the chunk from its beginning")
        held.body += body
        held.at = self._clock()
        if len(held.body) < chunk.bytes:
            return
        del self._arriving[call.owner]
        if problem := await asyncio.to_thread(find_problem, chunk, held.body):
            raise OSError(errno.EBADMSG, problem)
        await self._memory.put(chunk, held.body)

    def _begin(self, owner: str, digest: str) -> None:
        now = self._clock()
        for other in [o for o, a in self._arriving.items() if now - a.at >= GIVEN_UP_SECONDS]:
            del self._arriving[other]
        self._arriving.pop(owner, None)
        self._arriving[owner] = Arriving(digest, now)
        if len(self._arriving) > SENDERS:
            del self._arriving[next(iter(self._arriving))]

    def _check_room(self, size: int) -> None:
        folder = self._memory.others.folder
        if size > LIMIT_BYTES:
            raise OSError(errno.EFBIG, f"{size} bytes, the limit is {LIMIT_BYTES}")
        if shutil.disk_usage(folder).free < size + RESERVE_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def pack(call: PieceCall, body: memoryview) -> tuple[bytes, memoryview]:
    return codec.dumps(call) + END, body


async def _answer(work: Awaitable[None]) -> bytes:
    try:
        await work
    except OSError as error:
        return codec.dumps(
            TierAnswer(error=error.errno or errno.EIO, message=error.strerror or str(error))
        )
    return codec.dumps(TierAnswer())

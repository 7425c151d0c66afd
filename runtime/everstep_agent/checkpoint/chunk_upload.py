"""Uploads a staged file as chunks. At most `concurrency` chunks are in memory at once."""

import asyncio
import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass

from everstep_agent.checkpoint.bounded import all_of
from everstep_agent.checkpoint.chunking import CHUNK_BYTES, BadStaging, ChunkPlan, plan_chunks
from everstep_agent.checkpoint.digest import compute, sum_pieces
from everstep_agent.checkpoint.ledger import build_segments
from everstep_agent.checkpoint.parts import Part
from everstep_agent.storage.store import ObjectStore
from everstep_contract import ledger
from everstep_contract.ledger import LedgerEntry
from everstep_contract.manifest import Chunk, LedgerSegment, Piece, Tensor
from everstep_contract.places import Place
from everstep_contract.wire import Staged

CONCURRENCY = 4


def chunk_key(token: str, step: int, digest: str) -> str:
    """Contains the claim and the step: a chunk that is uploaded again after a `retire` has another
    key.
    """
    return f"chunks/{token[:8]}/{step:010d}/{digest}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Uploaded:
    part: Part
    places: dict[str, Place]
    """Digest → where the chunk lies in the staged file."""


class Uploader:
    """One agent's uploads under one claim.

    Chunks of this agent's newest *committed* save are not uploaded again (frozen layers); call
    `committed` once the run log has it. No other chunks are reused, because their keys may be
    retired.
    """

    def __init__(
        self,
        store: ObjectStore,
        token: str,
        *,
        concurrency: int = CONCURRENCY,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self._store = store
        self._token = token
        self._chunk_bytes = chunk_bytes
        self._slots = asyncio.Semaphore(concurrency)
        self._uploaded: dict[tuple[int, int], dict[str, Chunk]] = {}
        self._known: dict[str, Chunk] = {}

    async def upload(
        self, staged: Staged, rank: int, entries: Iterable[LedgerEntry] = ()
    ) -> Uploaded:
        """Store everything that one rank staged.

        Args:
            entries: for the lead: the ledger since the newest commit, up to `staged.step`.

        Raises:
            BadStaging: the file does not hold what `staged` says.
            StoreError: the store did not take it.
        """
        size = os.stat(staged.path).st_size
        plans = await asyncio.to_thread(plan_chunks, staged.tensors, size, self._chunk_bytes)
        places = await self._send_file(staged, plans) if plans else []
        chunks = [chunk for chunk, _ in places]
        segments, book = await self._send_ledger(staged, entries) if staged.lead else ((), [])
        self._remember(staged, [*chunks, *book])
        part = Part(
            epoch=staged.epoch,
            step=staged.step,
            rank=rank,
            whole=staged.whole,
            lead=staged.lead,
            tensors=(*_tensors(plans, chunks), *_empty(staged)),
            chunks=_unique([*chunks, *book]),
            state=staged.state,
            ledger=segments,
            layout=staged.layout,
            packed=staged.packed,
            digests=staged.digests,
            not_finite=staged.not_finite,
            pins=staged.pins,
        )
        return Uploaded(part=part, places={chunk.digest: place for chunk, place in places})

    def committed(self, epoch: int, step: int) -> None:
        """The save of (epoch, step) is in the log: its chunks may be reused."""
        if (epoch, step) in self._uploaded:
            self._known = self._uploaded[epoch, step]
        self._uploaded = {k: v for k, v in self._uploaded.items() if k[1] > step}

    def forget(self) -> None:
        """Reuse no chunk of an older save any more."""
        self._known = {}

    def _remember(self, staged: Staged, chunks: list[Chunk]) -> None:
        mine = self._uploaded.setdefault((staged.epoch, staged.step), {})
        mine.update({c.digest: c for c in chunks})

    async def _send_file(self, staged: Staged, plans: list[ChunkPlan]) -> list[tuple[Chunk, Place]]:
        with open(staged.path, "rb") as file:  # noqa: ASYNC230 a file in memory
            view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            return await all_of(self._send(staged, view, p) for p in plans)
        finally:
            view.close()

    async def _send(self, staged: Staged, view: mmap.mmap, plan: ChunkPlan) -> tuple[Chunk, Place]:
        spans = [(box.start - plan.start, box.end - box.start) for box in plan.boxes]
        async with self._slots:
            # A copy: the store's client may keep the buffer after a failed try.
            body = await asyncio.to_thread(view.__getitem__, slice(plan.start, plan.end))
            sums = await asyncio.to_thread(sum_pieces, body, spans)
            chunk = await self._put(staged.step, body)
        place = Place(path=staged.path, start=plan.start, bytes=len(body), sums=sums)
        return chunk, place

    async def _send_ledger(
        self, staged: Staged, entries: Iterable[LedgerEntry]
    ) -> tuple[tuple[LedgerSegment, ...], list[Chunk]]:
        lines = [e for e in entries if e.step <= staged.step]
        if not lines:
            return (), []
        chunk = await self._put(staged.step, ledger.encode_lines(lines))
        return build_segments(lines, chunk.digest), [chunk]

    async def _put(self, step: int, body: bytes) -> Chunk:
        digest = await asyncio.to_thread(compute, body)
        if digest in self._known:
            return self._known[digest]
        chunk = Chunk(digest=digest, key=chunk_key(self._token, step, digest), bytes=len(body))
        await self._store.put(chunk.key, body)
        return chunk


def _tensors(plans: list[ChunkPlan], chunks: list[Chunk]) -> tuple[Tensor, ...]:
    pieces: dict[tuple[str, str, tuple[int, ...]], list[Piece]] = {}
    for plan, chunk in zip(plans, chunks, strict=True):
        for box in plan.boxes:
            piece = Piece(
                offsets=box.offsets,
                lengths=box.lengths,
                chunk=chunk.digest,
                at=box.start - plan.start,
            )
            pieces.setdefault((box.name, box.dtype, box.shape), []).append(piece)
    names = [name for name, _, _ in pieces]
    if len(set(names)) != len(names):
        raise BadStaging("one tensor was staged with two dtypes or shapes")
    return tuple(
        Tensor(name=name, dtype=dtype, shape=shape, pieces=tuple(boxes))
        for (name, dtype, shape), boxes in pieces.items()
    )


def _empty(staged: Staged) -> list[Tensor]:
    """A tensor without elements has no piece, but a name, a dtype and a shape."""
    return [
        Tensor(name=t.name, dtype=t.dtype, shape=t.shape, pieces=())
        for t in staged.tensors
        if 0 in t.shape
    ]


def _unique(chunks: list[Chunk]) -> tuple[Chunk, ...]:
    return tuple({c.digest: c for c in chunks}.values())

"""Uploads a staged file in chunks, straight from its memory, at most `concurrency` at once."""

import asyncio
from collections.abc import Iterable, Sequence

from everstep_agent import aside
from everstep_agent.checkpoint.bounded import all_of
from everstep_agent.checkpoint.chunking import BadStaging
from everstep_agent.checkpoint.cutting import Cut, cut_file, map_file
from everstep_agent.checkpoint.digest import compute
from everstep_agent.checkpoint.ledger import build_segments
from everstep_agent.checkpoint.parts import Part
from everstep_agent.checkpoint.tiers import StoreTier
from everstep_agent.storage.store import ObjectStore
from everstep_contract import ledger
from everstep_contract.ledger import LedgerEntry
from everstep_contract.manifest import Chunk, LedgerSegment, Piece, Tensor
from everstep_contract.wire import Staged

CONCURRENCY = 4


def chunk_key(token: str, step: int, digest: str) -> str:
    """The key contains the claim and the step, so a chunk that is uploaded again after a `retire`
    has another key.
    """
    return f"chunks/{token[:8]}/{step:010d}/{digest}"


class Uploader:
    """One agent's uploads under one claim. A staged file must not be released before its upload has
    ended.

    Chunks of this agent's newest *committed* save are not uploaded again (frozen layers). Call
    `committed` once the run log has that save. No other chunks are reused, because their keys may
    be retired.
    """

    def __init__(
        self,
        store: ObjectStore,
        token: str,
        *,
        concurrency: int = CONCURRENCY,
    ) -> None:
        self._store = StoreTier(store)
        self._token = token
        self._slots = asyncio.Semaphore(concurrency)
        self._uploaded: dict[tuple[int, int], dict[str, Chunk]] = {}
        self._known: dict[str, Chunk] = {}

    async def upload(
        self,
        staged: Staged,
        rank: int,
        entries: Iterable[LedgerEntry] = (),
        cuts: Sequence[Cut] | None = None,
    ) -> Part:
        """Store everything that one rank staged.

        Args:
            entries: for the lead: the ledger since the newest commit, up to `staged.step`.
            cuts: the staged file's chunks, if they are known already.

        Raises:
            BadStaging: the file does not match its description in `staged`.
            OSError: it cannot be read.
            StoreError: the store did not take it.
        """
        found = await cut_file(staged) if cuts is None else cuts
        view = map_file(staged.path) if found else memoryview(b"")
        chunks = await all_of(self._send(staged.step, cut, view) for cut in found)
        segments, book = await self._send_ledger(staged, entries) if staged.lead else ((), [])
        self._remember(staged, [*chunks, *book])
        return Part(
            epoch=staged.epoch,
            step=staged.step,
            rank=rank,
            whole=staged.whole,
            lead=staged.lead,
            tensors=(*_tensors(found), *_empty(staged)),
            chunks=_unique([*chunks, *book]),
            state=staged.state,
            ledger=segments,
            layout=staged.layout,
            packed=staged.packed,
            digests=staged.digests,
            not_finite=staged.not_finite,
            pins=staged.pins,
        )

    def committed(self, epoch: int, step: int) -> None:
        """The save of (epoch, step) is in the log, so its chunks may be reused."""
        if (epoch, step) in self._uploaded:
            self._known = self._uploaded[epoch, step]
        self._uploaded = {k: v for k, v in self._uploaded.items() if k[1] > step}

    def disown(self, epoch: int, step: int) -> None:
        """Reuse no chunk of this save: what was uploaded may not be what was staged."""
        self._uploaded.pop((epoch, step), None)

    def forget(self) -> None:
        """Reuse no chunk of an older save any more."""
        self._known = {}

    def _remember(self, staged: Staged, chunks: list[Chunk]) -> None:
        mine = self._uploaded.setdefault((staged.epoch, staged.step), {})
        mine.update({c.digest: c for c in chunks})

    async def _send(self, step: int, cut: Cut, view: memoryview) -> Chunk:
        place = cut.place
        body = view[place.start : place.start + place.bytes]
        if len(body) < place.bytes:
            raise BadStaging(f"{place.path} is shorter than it was")
        async with self._slots:
            return await self._put(step, cut.digest, body)

    async def _send_ledger(
        self, staged: Staged, entries: Iterable[LedgerEntry]
    ) -> tuple[tuple[LedgerSegment, ...], list[Chunk]]:
        lines = [e for e in entries if e.step <= staged.step]
        if not lines:
            return (), []
        body = ledger.encode_lines(lines)
        chunk = await self._put(staged.step, await aside.run(compute, body), body)
        return build_segments(lines, chunk.digest), [chunk]

    async def _put(self, step: int, digest: str, body: bytes | memoryview) -> Chunk:
        if digest in self._known:
            return self._known[digest]
        chunk = Chunk(digest=digest, key=chunk_key(self._token, step, digest), bytes=len(body))
        await self._store.put(chunk, body)
        return chunk


def _tensors(cuts: Iterable[Cut]) -> tuple[Tensor, ...]:
    pieces: dict[tuple[str, str, tuple[int, ...]], list[Piece]] = {}
    for cut in cuts:
        for box in cut.plan.boxes:
            piece = Piece(
                offsets=box.offsets,
                lengths=box.lengths,
                chunk=cut.digest,
                at=box.start - cut.plan.start,
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
    """The tensors without elements. They have no pieces, but a name, a dtype and a shape."""
    return [
        Tensor(name=t.name, dtype=t.dtype, shape=t.shape, pieces=())
        for t in staged.tensors
        if 0 in t.shape
    ]


def _unique(chunks: list[Chunk]) -> tuple[Chunk, ...]:
    return tuple({c.digest: c for c in chunks}.values())

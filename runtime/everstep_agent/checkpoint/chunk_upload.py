"""Uploads a staged file in chunks, straight from its memory, at most `concurrency` at once."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from everstep_agent import aside
from everstep_agent.checkpoint.bounded import all_of
from everstep_agent.checkpoint.chunking import BadStaging
from everstep_agent.checkpoint.cutting import Cut, cut_file, map_file
from everstep_agent.checkpoint.digest import compute
from everstep_agent.checkpoint.ledger import build_segments, split_entries
from everstep_agent.checkpoint.parts import Part
from everstep_agent.checkpoint.tiers import StoreTier
from everstep_agent.storage.errors import StoreError
from everstep_agent.storage.store import ObjectStore
from everstep_agent.storage.window import Window
from everstep_contract import ledger
from everstep_contract.ledger import LedgerEntry
from everstep_contract.manifest import Chunk, LedgerSegment, Piece, Tensor
from everstep_contract.wire import Staged

CONCURRENCY = 4
UNVERIFIED = 4
"""Of how many committed saves the chunks are remembered until one of them is read back."""


def chunk_key(token: str, step: int, digest: str) -> str:
    """The key contains the claim and the step, so a chunk that is uploaded again after a `retire`
    has another key.
    """
    return f"chunks/{token[:8]}/{step:010d}/{digest}"


class Uploader:
    """One agent's uploads under one claim. A staged file must not be released before its upload has
    ended.

    Chunks of this agent's newest *verified* save are not uploaded again (frozen layers). Call
    `committed` once the run log has a save, and `verified` once it was read back. Chunks of a save
    that is not verified are not reused: one that the store has lost would be missing in each later
    save, too. Nor are those of older saves, because their keys may be retired.

    After an upload that failed, the next one continues: what the store took is not sent again, and
    at first fewer chunks are sent at once, because a slow store may take none of several in time.
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
        self._window = Window(concurrency)
        self._taken: dict[tuple[int, int], dict[str, Chunk]] = {}
        """(epoch, step) of a save whose upload failed → the chunks that the store took of it."""
        self._uploaded: dict[tuple[int, int], dict[str, Chunk]] = {}
        """(epoch, step) of a save that is not verified → its chunks."""
        self._known: dict[str, Chunk] = {}

    async def upload(
        self,
        staged: Staged,
        rank: int,
        entries: Iterable[LedgerEntry] = (),
        cuts: Sequence[Cut] | None = None,
    ) -> Part:
        """Store everything that one rank staged. A part that holds NaN or infinite values where it must
        not is never committed, so nothing of it is stored.

        Args:
            entries: for the lead: the ledger since the newest commit, up to `staged.step`.
            cuts: the staged file's chunks, if they are known already.

        Raises:
            BadStaging: the file does not match its description in `staged`.
            OSError: it cannot be read.
            StoreError: the store did not take it.
        """
        found = await cut_file(staged) if cuts is None else cuts
        if staged.not_finite:
            return _build_part(staged, rank, found)
        try:
            chunks = await self._send_all(staged, found)
            segments, book = await self._send_ledger(staged, entries) if staged.lead else ((), [])
        except StoreError:
            self._window.halve()
            raise
        self._taken.pop((staged.epoch, staged.step), None)
        self._remember(staged, [*chunks, *book])
        part = _build_part(staged, rank, found)
        return replace(part, chunks=_unique([*chunks, *book]), ledger=segments)

    def committed(self, epoch: int, step: int) -> None:
        """The save of (epoch, step) is in the log."""
        for old in sorted(k for k in self._uploaded if k[1] <= step)[:-UNVERIFIED]:
            del self._uploaded[old]
        self._taken = {k: v for k, v in self._taken.items() if k[1] > step}

    def verified(self, epoch: int, step: int) -> None:
        """The save of (epoch, step) was read back, so its chunks may be reused."""
        self._known = self._uploaded.get((epoch, step), self._known)
        self._uploaded = {k: v for k, v in self._uploaded.items() if k[1] > step}

    def disown(self, epoch: int, step: int) -> None:
        """Reuse no chunk of this save: what was uploaded may not be what was staged."""
        self._uploaded.pop((epoch, step), None)
        self._taken.pop((epoch, step), None)

    def forget(self) -> None:
        """Reuse no chunk that was uploaded before."""
        self._known, self._taken = {}, {}

    def _remember(self, staged: Staged, chunks: list[Chunk]) -> None:
        mine = self._uploaded.setdefault((staged.epoch, staged.step), {})
        mine.update({c.digest: c for c in chunks})

    async def _send_all(self, staged: Staged, cuts: Sequence[Cut]) -> list[Chunk]:
        view = map_file(staged.path) if cuts else memoryview(b"")

        async def send(cut: Cut) -> Chunk:
            place = cut.place
            body = view[place.start : place.start + place.bytes]
            if len(body) < place.bytes:
                raise BadStaging(f"{place.path} is shorter than it was")
            return await self._put(staged, cut.digest, body)

        return await all_of(send(cut) for cut in cuts)

    async def _send_ledger(
        self, staged: Staged, entries: Iterable[LedgerEntry]
    ) -> tuple[tuple[LedgerSegment, ...], list[Chunk]]:
        segments: list[LedgerSegment] = []
        chunks: list[Chunk] = []
        for some in split_entries([e for e in entries if e.step <= staged.step]):
            body = await aside.run(ledger.encode_lines, some)
            chunks.append(await self._put(staged, await aside.run(compute, body), body))
            segments += build_segments(some, chunks[-1].digest)
        return tuple(segments), chunks

    async def _put(self, staged: Staged, digest: str, body: bytes | memoryview) -> Chunk:
        taken = self._taken.setdefault((staged.epoch, staged.step), {})
        if found := self._known.get(digest) or taken.get(digest):
            return found
        key = chunk_key(self._token, staged.step, digest)
        chunk = Chunk(digest=digest, key=key, bytes=len(body))
        await self._window.run(lambda: self._store.put(chunk, body))
        taken[digest] = chunk
        return chunk


def _build_part(staged: Staged, rank: int, cuts: Sequence[Cut]) -> Part:
    """The part of a save of which nothing is stored yet."""
    return Part(
        epoch=staged.epoch,
        step=staged.step,
        rank=rank,
        whole=staged.whole,
        lead=staged.lead,
        tensors=(*_tensors(cuts), *_empty(staged)),
        state=staged.state,
        layout=staged.layout,
        packed=staged.packed,
        digests=staged.digests,
        not_finite=staged.not_finite,
        pins=staged.pins,
    )


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

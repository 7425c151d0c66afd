"""From a commit to files that workers can map. Workers never access the store."""

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from everstep_agent import aside
from everstep_agent.checkpoint.bounded import all_of
from everstep_agent.checkpoint.digest import Spans, sum_pieces
from everstep_agent.checkpoint.files import replace_file
from everstep_agent.checkpoint.keeping import Resumed, Save
from everstep_agent.checkpoint.landing import download
from everstep_agent.checkpoint.manifests import Broken, read_manifest
from everstep_agent.checkpoint.memory_tier import MemoryTier
from everstep_agent.checkpoint.tiers import NearTier, StoreTier, Tier, find_problem
from everstep_agent.storage.errors import StoreError
from everstep_agent.storage.store import DAMAGED_READS, ObjectStore
from everstep_agent.storage.window import Window
from everstep_contract import codec
from everstep_contract.log import Commit
from everstep_contract.manifest import ITEM_BYTES, LIMIT_BYTES, Chunk, Manifest
from everstep_contract.places import Place, Places, name_span

CONCURRENCY = 4
ASKED_AT_ONCE = 32
"""How many tiers are asked at the same time for what they hold."""
OWNER = "restore"
"""The owner of the chunks that this pod fetches."""
PLACES_NAME = "places.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    commit: Commit
    manifest: Manifest
    manifest_path: Path
    needed: Mapping[str, Chunk]
    """Digest → the chunks that hold tensors. The ledger is not downloaded."""
    spans: Mapping[str, Spans]
    """As `list_spans`."""
    places: dict[str, Place]
    """Digest → where the chunk is; `Fetcher.add` changes it."""
    places_path: Path
    """The same as a `Places` document, as of the start."""
    sources: Counter[str]
    """Tier → how many chunks came from it; `Fetcher.add` counts more."""


class Fetcher:
    """Brings chunks into this pod's memory, from the nearest tier that has them.

    Args:
        memory: this pod's memory.
        nearer: tiers to ask before the store, the first one first.
    """

    def __init__(
        self,
        store: ObjectStore,
        memory: MemoryTier,
        nearer: Sequence[NearTier] = (),
        *,
        concurrency: int = CONCURRENCY,
    ) -> None:
        self._memory, self._nearer, self._store = memory, nearer, StoreTier(store)
        self._turns = asyncio.Semaphore(concurrency)
        self._window = Window(concurrency)
        self._asking = asyncio.Lock()
        self._listed: list[tuple[NearTier, Collection[str]]] | None = None
        """What each of the nearer tiers held when it was asked."""

    async def fetch(self, commit: Commit, folder: Path, *, whole: bool = True) -> Fetched:
        """Bring one checkpoint here, and write the places of its chunks into `folder`. Its chunks
        that are here already are kept; other saves are deleted.

        Args:
            whole: False: only verify the chunks that are here already. The workers ask for what they
                need (`add`), because together they hold only a part of the model.

        Raises:
            Broken: the manifest or a chunk is gone or not what was committed.
            StoreError: the store cannot be read.
            OSError: there is no room.
        """
        self._listed = None
        # A copier that still runs must not tell other pods that nobody needs this step.
        self._memory.committed, self._memory.kept = commit.step, 0
        await self._memory.rewind(Resumed(epoch=commit.epoch, step=commit.step))
        self._memory.release_before(commit.step)
        await self._memory.freed()
        manifest, document = await self.find_manifest(commit)
        spans = list_spans(manifest)
        needed = {c.digest: c for c in manifest.chunks if c.digest in spans}
        listed = Chunk(digest=commit.digest, key=commit.manifest, bytes=len(document))
        save = Save(epoch=commit.epoch, step=commit.step, chunks=(*needed.values(), listed))
        await self._memory.keep(OWNER, [save], commit.step)
        await self._memory.put(listed, document)
        held = await self._memory.list()
        now = [c for c in needed.values() if whole or c.digest in held]
        found = await all_of(self.bring(chunk, spans[chunk.digest]) for chunk in now)
        places = {c.digest: place for c, (_, place) in zip(now, found, strict=True)}
        written = codec.dumps(Places(chunks=places))
        await asyncio.to_thread(replace_file, folder / PLACES_NAME, written)
        return Fetched(
            commit=commit,
            manifest=manifest,
            manifest_path=self._memory.others.folder / commit.digest,
            needed=needed,
            spans=spans,
            places=places,
            places_path=folder / PLACES_NAME,
            sources=Counter(tier for tier, _ in found),
        )

    async def add(self, fetched: Fetched, digest: str) -> str:
        """Bring one more chunk of a checkpoint here. Returns the tier that it came from.

        Raises as `fetch`.
        """
        tier, place = await self.bring(fetched.needed[digest], fetched.spans[digest])
        fetched.places[digest] = place
        fetched.sources[tier] += 1
        return tier

    async def recheck(self, fetched: Fetched, digest: str) -> bool:
        """Whether the chunk in this pod's memory is sound, perhaps because another worker's request
        has replaced it. If so, its place is noted anew.
        """
        chunk = fetched.needed[digest]
        body = await self._memory.get(chunk)
        problem = await asyncio.to_thread(find_problem, chunk, body)
        if body is None or problem:
            return False
        sums = await asyncio.to_thread(sum_pieces, body, fetched.spans[digest])
        fetched.places[digest] = self._memory.note(chunk, sums)
        return True

    async def bring(self, chunk: Chunk, spans: Spans) -> tuple[str, Place]:
        """Bring a chunk here. Returns the tier that it came from, and where it is now.

        Raises as `fetch`.
        """
        async with self._turns:
            place = self._memory.find(chunk.digest)
            if place and all(name_span(*span) in place.sums for span in spans):
                return self._memory.name, place
            async for tier in self._list_near(chunk.digest):
                body = await tier.get(chunk)
                problem = await asyncio.to_thread(find_problem, chunk, body)
                if body is not None and not problem:
                    if tier is not self._memory:
                        await self._memory.put(chunk, body)
                    sums = await asyncio.to_thread(sum_pieces, body, spans)
                    return tier.name, self._memory.note(chunk, sums)
            sums = await self._download(chunk, spans)
            return self._store.name, self._memory.note(chunk, sums)

    async def _download(self, chunk: Chunk, spans: Spans) -> dict[str, int]:
        """Download fewer chunks at once after one failed: a slow store may send none of several in
        time. What is here already is not downloaded again.
        """
        create = partial(self._memory.receive, chunk)
        try:
            return await self._window.run(lambda: download(self._store, chunk, spans, create))
        except StoreError:
            self._window.halve()
            raise

    async def find_manifest(self, commit: Commit) -> tuple[Manifest, bytes]:
        """The manifest, and the document as it was committed.

        Raises `Broken` and `StoreError` as `fetch`.
        """
        chunk = Chunk(digest=commit.digest, key=commit.manifest, bytes=LIMIT_BYTES)
        problem = f"{commit.manifest} is gone"
        async for tier in self._list_tiers(commit.digest):
            document = await tier.get(chunk)
            if document is None:
                continue
            try:
                return await read_manifest(commit, document), document
            except Broken as error:
                problem = str(error)
        raise Broken(problem)

    async def _list_tiers(self, digest: str) -> AsyncIterator[Tier]:
        async for tier in self._list_near(digest):
            yield tier
        for _ in range(DAMAGED_READS):
            yield self._store

    async def _list_near(self, digest: str) -> AsyncIterator[Tier]:
        """The tiers to ask for a chunk before the store. The nearer ones are asked what they hold
        only once this pod's memory lacks a chunk.
        """
        yield self._memory
        async with self._asking:
            if self._listed is None:
                turns = asyncio.Semaphore(ASKED_AT_ONCE)
                held = await all_of(_list_held(tier, turns) for tier in self._nearer)
                self._listed = list(zip(self._nearer, held, strict=True))
        for tier, digests in self._listed:
            if digest in digests:
                yield tier


async def _list_held(tier: NearTier, turns: asyncio.Semaphore) -> Collection[str]:
    async with turns:
        try:
            return await tier.list()
        except OSError:
            return ()


def list_spans(manifest: Manifest, objects: Collection[str] = ()) -> dict[str, Spans]:
    """Digest → where the pieces of tensors are in the chunk.

    Args:
        objects: only pieces of these tracked objects; empty: of all.
    """
    found: dict[str, set[tuple[int, int]]] = {}
    for tensor in manifest.tensors:
        if objects and tensor.name.partition("/")[0] not in objects:
            continue
        for piece in tensor.pieces:
            count = math.prod(piece.lengths) * ITEM_BYTES[tensor.dtype]
            found.setdefault(piece.chunk, set()).add((piece.at, count))
    return dict(found)


async def fetch_verified(store: ObjectStore, chunk: Chunk) -> bytes:
    """Read a chunk from the store and verify it, for work that no step waits for.

    Raises:
        Broken: the chunk is missing or does not match its digest.
    """
    problem = ""
    for _ in range(DAMAGED_READS):
        body = await StoreTier(store).get(chunk)
        problem = await aside.run(find_problem, chunk, body)
        if body is not None and not problem:
            return body
    raise Broken(problem)

"""A pod reads its share of a checkpoint back from the store, within its budget, after its uploads."""

import asyncio
import io
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agent.a_run import ARun
from agent.unreliable import UnreliableStore
from everstep_agent import logline
from everstep_agent.checkpoint.manifests import fetch_manifest
from everstep_agent.peers.budget import Budget
from everstep_agent.peers.read_back import ReadBack, Share
from everstep_agent.pod import share_reader
from everstep_agent.pod.share_reader import ShareReader
from everstep_agent.storage import open_store
from everstep_contract.log import Commit
from everstep_contract.ranges import Ranges

ME = (0, 0, 1)


@pytest.fixture
def store() -> UnreliableStore:
    return UnreliableStore(open_store("memory://", "", {}))


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(share_reader, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(share_reader, "UPLOAD_SECONDS", 0.05)
    monkeypatch.setattr(share_reader, "POLL_SECONDS", 0.01)


class Rig:
    def __init__(self, store: UnreliableStore, commit: Commit, chunks: list[str]) -> None:
        self.store, self.commit, self.chunks = store, commit, chunks
        self.news, self.uploads = asyncio.Event(), False
        self.slept: list[float] = []
        self.reader = ShareReader(
            store,
            Budget(100.0, lambda: 0.0, self._sleep),
            uploads=lambda: self.uploads,
            on_news=self.news.set,
            line=logline.Log(io.StringIO()),
        )

    async def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)

    def share(self, places: Ranges) -> ReadBack:
        mine = Share(slot=0, attempt=0, incarnation=1, chunks=places)
        return ReadBack(commit=self.commit, shares=(mine,))

    async def until(self, true: Callable[[], object]) -> None:
        async with asyncio.timeout(10):
            while not true():
                self.news.clear()
                await self.news.wait()

    @property
    def read_keys(self) -> list[str]:
        return [key for verb, key in self.store.calls if verb == "get" and "chunks/" in key]


@asynccontextmanager
async def a_rig(store: UnreliableStore, folder: Path) -> AsyncIterator[Rig]:
    run = ARun(store, folder / "staged")
    await run.claim(1)
    saved = await run.save(2)
    chunks = [c.key for c in (await fetch_manifest(store, saved)).chunks]
    assert len(chunks) > 2
    store.calls.clear()
    rig = Rig(store, saved, chunks)
    yield rig
    await rig.reader.close()


async def test_it_reads_its_share_and_nothing_else(store: UnreliableStore, tmp_path: Path) -> None:
    async with a_rig(store, tmp_path) as rig:
        rig.reader.follow(rig.share(((0, 2),)), ME)
        assert rig.reader.report().left == 2
        await rig.until(lambda: not rig.reader.report().left)
        assert rig.reader.report().read == ((0, 2),)
        assert rig.read_keys == rig.chunks[:2]
        assert rig.slept, "the second read must wait until the budget allows it"


async def test_the_same_level_again_reads_nothing_again_and_a_larger_share_only_the_rest(
    store: UnreliableStore, tmp_path: Path
) -> None:
    async with a_rig(store, tmp_path) as rig:
        rig.reader.follow(rig.share(((0, 1),)), ME)
        rig.reader.follow(rig.share(((0, 1),)), ME)
        await rig.until(lambda: not rig.reader.report().left)
        rig.reader.follow(rig.share(((0, 3),)), ME)
        await rig.until(lambda: not rig.reader.report().left)
        assert rig.read_keys == rig.chunks[:3]


async def test_a_share_that_another_pod_got_is_read_no_more(
    store: UnreliableStore, tmp_path: Path
) -> None:
    async with a_rig(store, tmp_path) as rig:
        rig.reader.follow(rig.share(((0, 3),)), ME)
        rig.reader.follow(rig.share(()), ME)
        assert rig.reader.report().left == 0
        await rig.news.wait()
        assert rig.read_keys == []


async def test_a_corrupt_chunk_is_reported_with_its_key(
    store: UnreliableStore, tmp_path: Path
) -> None:
    async with a_rig(store, tmp_path) as rig:
        store.corrupt = {rig.chunks[1]}
        rig.reader.follow(rig.share(((0, 3),)), ME)
        await rig.until(lambda: rig.reader.report().problem)
        assert f"{rig.chunks[1]} is corrupt" in rig.reader.report().problem
        rig.reader.follow(rig.share(((0, 3),)), ME)
        first, damaged, *_ = rig.chunks
        assert rig.read_keys == [first, damaged, damaged], "of a broken one, the rest is not read"


async def test_a_store_that_does_not_answer_is_told_and_waited_for(
    store: UnreliableStore, tmp_path: Path
) -> None:
    async with a_rig(store, tmp_path) as rig:
        store.away = True
        rig.reader.follow(rig.share(((0, 1),)), ME)
        await rig.until(lambda: rig.reader.error)
        assert rig.reader.report().problem == "", "the checkpoint may be intact"
        store.away = False
        await rig.until(lambda: not rig.reader.report().left)
        assert rig.reader.error is None


async def test_uploads_go_first_but_not_for_ever(
    store: UnreliableStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(share_reader, "UPLOAD_SECONDS", 3600.0)
    async with a_rig(store, tmp_path) as rig:
        rig.uploads = True
        rig.reader.follow(rig.share(((0, 1),)), ME)
        await asyncio.sleep(0.1)
        assert rig.read_keys == []
        rig.uploads = False
        await rig.until(lambda: not rig.reader.report().left)
        monkeypatch.setattr(share_reader, "UPLOAD_SECONDS", 0.05)
        rig.uploads = True
        rig.reader.follow(rig.share(((0, 2),)), ME)
        await rig.until(lambda: not rig.reader.report().left)
        assert rig.read_keys == rig.chunks[:2]


async def test_after_the_read_back_it_stops_and_still_says_what_it_has_read(
    store: UnreliableStore, tmp_path: Path
) -> None:
    async with a_rig(store, tmp_path) as rig:
        rig.reader.follow(rig.share(((0, 1),)), ME)
        await rig.until(lambda: not rig.reader.report().left)
        rig.reader.follow(None, ME)
        assert rig.reader.report().read == ((0, 1),), "the next coordinator asks for it"

"""What a pod does when it cannot load a checkpoint into its memory: it waits, reports why, and does
not fall back to an older checkpoint.
"""

import asyncio
import errno
import io
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent.a_run import ARun
from agent.unreliable import UnreliableStore
from everstep_agent import logline
from everstep_agent.checkpoint.memory_tier import MemoryTier
from everstep_agent.checkpoint.restore import Fetched, Fetcher
from everstep_agent.pod import fetch_state
from everstep_agent.storage import open_store
from everstep_contract import levels, wire
from everstep_contract.log import Commit
from everstep_contract.places import Place


async def test_where_there_is_no_room_for_a_checkpoint_it_is_said_and_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_state, "RETRY_SECONDS", 0.02)
    store = open_store("memory://", "", {})
    run = ARun(store, tmp_path / "staged")
    await run.claim(1)
    newest = await run.save(2)
    folder = tmp_path / "restore"
    folder.write_bytes(b"")  # a file in the folder's place: nothing can be written in it
    said: list[levels.StorageError | None] = []
    told = asyncio.Event()

    def on_wait(error: levels.StorageError | None) -> None:
        said.append(error)
        told.set()

    fetcher = Fetcher(store, MemoryTier(folder))
    fetching = asyncio.create_task(
        fetch_state.persist(
            lambda: fetcher.fetch(newest, folder), "the checkpoint of step 2", folder, on_wait
        )
    )
    await asyncio.wait_for(told.wait(), 30)
    folder.unlink()
    fetched = await asyncio.wait_for(fetching, 30)
    assert fetched.commit == newest
    assert said[0] is not None
    assert said[0].kind == "NotWritten"
    assert "checkpoint of step 2" in said[0].message
    assert "cordon the node" in said[0].message
    assert said[-1] is None


def test_only_a_full_folder_is_called_full() -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    told = fetch_state.describe_unwritten(full, "the checkpoint of step 2", Path("/dev/shm"))
    assert told.kind == "NoRoom"
    assert "stagingMemory, or without a cluster make room there" in told.message
    broken = OSError(errno.EIO, os.strerror(errno.EIO))
    told = fetch_state.describe_unwritten(broken, "the checkpoint of step 2", Path("/dev/shm"))
    assert told.kind == "NotWritten"
    assert "stagingMemory" not in told.message


class Told:
    """A pod's `Restorer`, asked for the newest checkpoint of a run, and what it reports."""

    def __init__(self, store: UnreliableStore, folder: Path) -> None:
        self.store, self.news = store, asyncio.Event()
        self.restorer = fetch_state.Restorer(
            store, folder, MemoryTier(folder), self.news.set, logline.Log(io.StringIO())
        )
        self.fetched: asyncio.Future[Fetched | None] = asyncio.Future()

    async def start(self, commit: Commit, *, whole: bool = True) -> Fetched:
        async def then(fetched: Fetched | None, seconds: float) -> None:
            self.fetched.set_result(fetched)

        self.restorer.ask(1, commit, (), then, whole=whole)
        found = await asyncio.wait_for(self.fetched, 30)
        assert found is not None
        return found

    def ask(self, digest: str, damaged: Place | None = None) -> asyncio.Future[Place]:
        """What a worker does that needs this chunk."""
        found: asyncio.Future[Place] = asyncio.Future()
        asked = wire.FetchChunk(epoch=1, digest=digest, damaged=damaged)
        assert self.restorer.bring(asked, found.set_result)
        return found


@pytest.fixture
async def told(tmp_path: Path) -> AsyncIterator[Told]:
    store = UnreliableStore(open_store("memory://", "", {}))
    found = Told(store, tmp_path / "restore")
    yield found
    await found.restorer.close()


def read(place: Place) -> bytes:
    return Path(place.path).read_bytes()


def damage(place: Place) -> None:
    Path(place.path).write_bytes(bytes(place.bytes))


async def test_two_workers_that_find_the_same_damage_cost_one_download(
    told: Told, tmp_path: Path
) -> None:
    run = ARun(told.store, tmp_path / "staged")
    await run.claim(1)
    fetched = await told.start(await run.save(2))
    (digest, place), *_ = fetched.places.items()
    told.store.calls.clear()
    whole = read(place)
    damage(place)
    both = await asyncio.gather(told.ask(digest, place), told.ask(digest, place))
    assert both == [place, place], "the sound copy has the name of the damaged one"
    assert read(place) == whole
    assert [kind for kind, _ in told.store.calls] == ["get"]
    assert await told.ask(digest, place) == place, "the last one to report it meets a sound copy"
    assert [kind for kind, _ in told.store.calls] == ["get"]


async def test_a_damaged_chunk_without_another_copy_makes_the_checkpoint_broken(
    told: Told, tmp_path: Path
) -> None:
    run = ARun(told.store, tmp_path / "staged")
    await run.claim(1)
    newest = await run.save(2)
    fetched = await told.start(newest)
    (digest, place), *_ = fetched.places.items()
    damage(place)
    await told.store.delete(next(c.key for c in fetched.manifest.chunks if c.digest == digest))
    told.news.clear()
    answer = told.ask(digest, place)
    await asyncio.wait_for(told.news.wait(), 30)
    assert told.restorer.broken is not None
    assert told.restorer.broken.manifest == newest.manifest
    assert "is gone" in told.restorer.broken.message
    assert not answer.done(), "the worker waits until the epoch is cut"


async def test_a_pod_without_a_whole_unit_brings_only_what_its_workers_ask_for(
    told: Told, tmp_path: Path
) -> None:
    run = ARun(told.store, tmp_path / "staged")
    await run.claim(1)
    fetched = await told.start(await run.save(2, world=4), whole=False)
    assert fetched.places == {}
    first, second, *others = fetched.needed
    assert others
    told.store.calls.clear()
    places = await asyncio.gather(told.ask(first), told.ask(first), told.ask(second))
    assert places[0] == places[1] == fetched.places[first]
    keys = sorted(fetched.needed[digest].key for digest in (first, second))
    assert sorted(key for kind, key in told.store.calls if kind == "get") == keys
    here = os.listdir(tmp_path / "restore/chunks")
    assert set(here).isdisjoint(others)
    assert told.restorer.sources == {"store": 2}


async def test_what_is_in_the_pods_memory_is_verified_before_its_workers_start(
    told: Told, tmp_path: Path
) -> None:
    run = ARun(told.store, tmp_path / "staged")
    await run.claim(1)
    commit = await run.save(2, world=4)
    before = await told.start(commit, whole=False)
    digest = next(iter(before.needed))
    place = await told.ask(digest)
    told.fetched = asyncio.Future()
    again = await told.start(commit, whole=False)
    assert again.places == {digest: place}
    assert again.sources == {"memory": 1}


async def test_a_chunk_that_is_here_does_not_hide_that_another_one_waits_for_the_store(
    told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_state, "RETRY_SECONDS", 0.02)
    run = ARun(told.store, tmp_path / "staged")
    await run.claim(1)
    fetched = await told.start(await run.save(2, world=4), whole=False)
    first, second, *_ = fetched.needed
    await told.ask(first)
    told.store.away = True
    told.news.clear()
    waits = told.ask(second)
    await asyncio.wait_for(told.news.wait(), 30)
    await told.ask(first)
    assert told.restorer.error is not None
    assert not waits.done()
    told.store.away = False
    assert (await asyncio.wait_for(waits, 30)).path.endswith(second)
    assert told.restorer.error is None


async def test_a_request_for_a_chunk_of_another_checkpoint_is_ignored(
    told: Told, tmp_path: Path
) -> None:
    run = ARun(told.store, tmp_path / "staged")
    await run.claim(1)
    asked = wire.FetchChunk(epoch=1, digest="0" * 64)
    assert not told.restorer.bring(asked, lambda place: None), "there is no checkpoint yet"
    await told.start(await run.save(2))
    assert not told.restorer.bring(asked, lambda place: None)

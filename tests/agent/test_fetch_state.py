"""What a pod does when it cannot load a checkpoint into its memory: it waits, reports why, and does
not fall back to an older checkpoint.
"""

import asyncio
import io
from collections.abc import AsyncIterator
from dataclasses import replace
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
    assert said[0].kind == "NoRoom"
    assert "checkpoint of step 2" in said[0].message
    assert "stagingMemory" in said[0].message
    assert said[-1] is None


class Told:
    """A pod's `Restorer`, asked for the newest checkpoint of a run, and what it reports."""

    def __init__(self, store: UnreliableStore, folder: Path) -> None:
        self.store, self.news = store, asyncio.Event()
        self.restorer = fetch_state.Restorer(
            store, folder, MemoryTier(folder), self.news.set, logline.Log(io.StringIO())
        )
        self.fetched: asyncio.Future[Fetched | None] = asyncio.Future()

    async def start(self, commit: Commit) -> Fetched:
        async def then(fetched: Fetched | None, seconds: float) -> None:
            self.fetched.set_result(fetched)

        self.restorer.ask(1, commit, (), then)
        found = await asyncio.wait_for(self.fetched, 30)
        assert found is not None
        return found

    def report(self, digest: str, place: Place) -> asyncio.Future[Place]:
        found: asyncio.Future[Place] = asyncio.Future()
        bad = wire.BadChunk(epoch=1, digest=digest, place=place)
        self.restorer.mend(bad, found.set_result)
        return found


@pytest.fixture
async def told(tmp_path: Path) -> AsyncIterator[Told]:
    store = UnreliableStore(open_store("memory://", "", {}))
    found = Told(store, tmp_path / "restore")
    yield found
    await found.restorer.close()


async def test_two_workers_that_find_the_same_damage_cost_one_download(
    told: Told, tmp_path: Path
) -> None:
    run = ARun(told.store, tmp_path / "staged")
    await run.claim(1)
    fetched = await told.start(await run.save(2))
    (digest, place), *_ = fetched.places.items()
    told.store.calls.clear()
    moved = replace(place, path=place.path + "-elsewhere")
    fetched.places[digest] = moved
    both = await asyncio.gather(told.report(digest, moved), told.report(digest, moved))
    assert both == [place, place]
    assert [kind for kind, _ in told.store.calls] == ["get"]


async def test_a_damaged_chunk_without_another_copy_makes_the_checkpoint_broken(
    told: Told, tmp_path: Path
) -> None:
    run = ARun(told.store, tmp_path / "staged")
    await run.claim(1)
    newest = await run.save(2)
    fetched = await told.start(newest)
    (digest, place), *_ = fetched.places.items()
    await told.store.delete(next(c.key for c in fetched.manifest.chunks if c.digest == digest))
    told.news.clear()
    answer = told.report(digest, place)
    await asyncio.wait_for(told.news.wait(), 30)
    assert told.restorer.broken is not None
    assert told.restorer.broken.manifest == newest.manifest
    assert "is gone" in told.restorer.broken.message
    assert not answer.done(), "the worker waits until the epoch is cut"

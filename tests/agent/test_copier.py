"""When a pod copies its saves to another tier, and what it does if there is no room for two."""

import asyncio
import errno
import io
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agent.a_run import commit
from agent.given import an_epoch
from agent.tier_given import BODY, OWNER, a_chunk, a_save, hold_in_the_middle
from everstep_agent import logline
from everstep_agent.checkpoint.folder_tier import FolderTier
from everstep_agent.checkpoint.memory_tier import MemoryTier
from everstep_agent.peers.client import Pool
from everstep_agent.pod.copier import Copier
from everstep_agent.pod.copies import Copies
from everstep_contract import levels
from everstep_contract.manifest import Chunk

OTHER = b"another" * 1500


class SmallTier(FolderTier):
    """Has room for one save."""

    async def put(self, chunk: Chunk, body: bytes) -> None:
        if await self.list():
            raise OSError(errno.ENOSPC, "full")
        await super().put(chunk, body)


class Given:
    def __init__(self, folder: Path, tier: FolderTier, **settings: Any) -> None:
        self.folder = folder
        self.memory = MemoryTier(folder / "memory")
        self.tier, self.log, self.news = tier, io.StringIO(), asyncio.Event()
        self.copier = Copier(
            self.memory,
            tier,
            owner=OWNER,
            on_copied=self.news.set,
            line=logline.Log(self.log),
            **settings,
        )

    def stage(self, body: bytes, step: int) -> Path:
        return hold_in_the_middle(self.memory, self.folder, body, step=step)

    async def until_copied(self, step: int) -> None:
        async with asyncio.timeout(30):
            while self.copier.copied < step:
                self.news.clear()
                await self.news.wait()


@pytest.fixture
async def given(tmp_path: Path) -> AsyncIterator[Given]:
    found = Given(tmp_path, FolderTier(tmp_path / "tier", "disk"))
    yield found
    await found.copier.close()


async def test_a_copy_stays_until_a_newer_save_is_committed(given: Given) -> None:
    given.stage(BODY, 3)
    await given.until_copied(3)
    given.stage(OTHER, 6)
    await given.until_copied(6)
    assert set(await given.tier.list()) == {a_chunk().digest, a_chunk(OTHER).digest}
    third = b"third" * 900
    given.memory.note_commit(6)
    given.stage(third, 9)
    await given.until_copied(9)
    assert set(await given.tier.list()) == {a_chunk(OTHER).digest, a_chunk(third).digest}


async def test_a_committed_copy_stays_though_this_pod_gave_its_own_up(given: Given) -> None:
    given.stage(BODY, 3)
    await given.until_copied(3)
    given.memory.note_commit(3)
    given.stage(OTHER, 6)
    given.memory.release_oldest()
    await given.until_copied(6)
    assert set(await given.tier.list()) == {a_chunk().digest, a_chunk(OTHER).digest}


async def test_what_another_pod_holds_there_stays(given: Given) -> None:
    theirs = b"theirs" * 900
    await given.tier.keep("slot-2", [a_save(theirs)], 0)
    await given.tier.put(a_chunk(theirs), theirs)
    given.stage(BODY, 3)
    await given.until_copied(3)
    assert set(await given.tier.list()) == {a_chunk().digest, a_chunk(theirs).digest}


async def test_without_room_for_two_the_newer_copy_replaces_the_older(tmp_path: Path) -> None:
    given = Given(tmp_path, SmallTier(tmp_path / "tier", "disk"))
    try:
        given.stage(BODY, 3)
        await given.until_copied(3)
        given.stage(OTHER, 6)
        await given.until_copied(6)
        assert set(await given.tier.list()) == {a_chunk(OTHER).digest}
        assert "copy_waits" not in given.log.getvalue()
    finally:
        await given.copier.close()


class FullLater(FolderTier):
    """Has no room any more once `full` is set."""

    full = False

    async def put(self, chunk: Chunk, body: bytes) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "full")
        await super().put(chunk, body)


async def test_a_copy_that_was_deleted_for_a_newer_one_is_no_longer_reported(
    tmp_path: Path,
) -> None:
    tier = FullLater(tmp_path / "tier", "disk")
    given = Given(tmp_path, tier)
    try:
        given.stage(BODY, 3)
        await given.until_copied(3)
        tier.full = True
        given.news.clear()
        given.stage(OTHER, 6)
        await asyncio.wait_for(given.news.wait(), 30)
        assert given.copier.copied == 0
    finally:
        await given.copier.close()


class SlowTier(FolderTier):
    """A put ends once `go` is set."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "disk")
        self.begun, self.go = asyncio.Event(), asyncio.Event()

    async def put(self, chunk: Chunk, body: bytes) -> None:
        await super().put(chunk, body)
        self.begun.set()
        await self.go.wait()


async def test_saves_that_the_run_does_not_continue_are_not_reported_as_copied(
    tmp_path: Path,
) -> None:
    """All go back to step 3, while the save of step 6 is being copied to the node's disk."""
    disk = SlowTier(tmp_path / "disk")
    memory, news, told = MemoryTier(tmp_path / "memory"), asyncio.Event(), list[int]()

    def on_copied() -> None:
        told.append(copies.disk_step)
        if copies.disk_step == 4:
            news.set()

    context: Any = SimpleNamespace(
        settings=SimpleNamespace(peer_bandwidth=0, disk_seconds=0.0, slot=1),
        me=SimpleNamespace(slot=1),
        memory=memory,
        disk=disk,
        line=logline.Log(io.StringIO()),
    )
    copies = Copies(context, Pool("token"), on_copied)
    try:
        copies.aim(an_epoch(number=1), levels.Wanted())
        await asyncio.sleep(0)
        hold_in_the_middle(memory, tmp_path, BODY, step=6, epoch=1)
        await asyncio.wait_for(disk.begun.wait(), 30)
        copies.aim(an_epoch(number=2, commit=commit(1, 3)), levels.Wanted())
        await asyncio.sleep(0)
        disk.go.set()
        hold_in_the_middle(memory, tmp_path, OTHER, step=4, epoch=2)
        await asyncio.wait_for(news.wait(), 30)
        assert told == [4]
    finally:
        await copies.close()


async def test_a_tier_with_an_interval_gets_no_save_in_between(tmp_path: Path) -> None:
    began, over = asyncio.Event(), asyncio.Event()

    async def pause() -> None:
        began.set()
        await over.wait()

    given = Given(tmp_path, FolderTier(tmp_path / "tier", "disk"), pause=pause)
    try:
        given.stage(BODY, 3)
        await began.wait()
        given.stage(OTHER, 6)
        assert given.copier.copied == 3
        third = b"third" * 900
        given.memory.note_commit(6)
        given.stage(third, 9)
        over.set()
        await given.until_copied(9)
        assert set(await given.tier.list()) == {a_chunk(OTHER).digest, a_chunk(third).digest}
    finally:
        await given.copier.close()

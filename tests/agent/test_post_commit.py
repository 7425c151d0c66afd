"""Read-backs after commits: one runs, and only the newest waits."""

import asyncio
import io
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import pytest

from agent.a_run import ARun, commit, read_alone
from agent.unreliable import UnreliableStore
from everstep_agent import logline
from everstep_agent.checkpoint.retention import Retention
from everstep_agent.coordinator import post_commit
from everstep_agent.coordinator.post_commit import PostCommit, Saved
from everstep_agent.coordinator.read_back import ReadBacks
from everstep_agent.storage import ObjectStore, open_store
from everstep_contract.log import Commit
from everstep_contract.manifest import Chunk

NOBODY = ReadBacks(list, lambda: None, time.monotonic)


class SlowStore:
    """Replaces the retention. Its reads wait for the test."""

    blocked = ""
    unread: int | None = None
    """The step of a checkpoint of a former coordinator."""

    def __init__(self) -> None:
        self.read: list[int] = []
        self.begun = asyncio.Event()
        self.may_end = asyncio.Event()

    async def check(self, found: Commit, read: object) -> str:
        self.read.append(found.step)
        self.begun.set()
        await self.may_end.wait()
        return ""

    async def retire(self, token: str) -> None:
        return None

    def find_unread(self) -> Commit | None:
        return None if self.unread is None else commit(1, self.unread)


def saved(step: int, pins: Sequence[str] = ()) -> Saved:
    return Saved(commit=commit(1, step, pins=pins))


async def persist(call: Any) -> str:
    return str(await call())


def look_after_commits(
    retention: Any,
    read_backs: Any = NOBODY,
    *,
    is_calm: Callable[[], bool] = lambda: True,
    said: TextIO | None = None,
) -> PostCommit:
    line = logline.Log(said or io.StringIO())
    return PostCommit(retention, read_backs, good=None, persist=persist, is_calm=is_calm, line=line)


async def test_saves_that_come_faster_than_they_are_read_back_do_not_queue() -> None:
    store, said = SlowStore(), io.StringIO()
    after = look_after_commits(store, said=said)
    works = [asyncio.create_task(after.look_after(saved(1)))]
    async with asyncio.timeout(10):
        await store.begun.wait()
        works += [asyncio.create_task(after.look_after(saved(s))) for s in range(2, 9)]
        await asyncio.sleep(0)
        store.may_end.set()
        await asyncio.gather(*works)
    assert store.read == [1, 8], "after the running one, only the newest is read"
    assert after.good is not None
    assert after.good.step == 8
    assert "step 2 to 7" in " ".join(after.notes)
    assert "event=read_backs_skipped" in said.getvalue()


async def test_a_checkpoint_is_read_back_after_the_interruption_that_is_open() -> None:
    store = SlowStore()
    store.may_end.set()
    calm = False
    after = look_after_commits(store, is_calm=lambda: calm)
    work = asyncio.create_task(after.look_after(saved(1)))
    async with asyncio.timeout(10):
        await asyncio.sleep(0)
        after.changed.fire()
        await asyncio.sleep(0)
        assert not store.begun.is_set()
        calm = True
        after.changed.fire()
        await work
    assert store.read == [1]


async def test_an_interruption_without_end_holds_up_no_read_back_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(post_commit, "CALM_SECONDS", 0.01)
    store = SlowStore()
    store.may_end.set()
    after = look_after_commits(store, is_calm=lambda: False)
    async with asyncio.timeout(10):
        await after.look_after(saved(1))
    assert store.read == [1]


class SavedMeanwhile(SlowStore):
    """Step 9 is committed while a checkpoint of a former coordinator is read back."""

    unread = 5
    after: PostCommit

    async def check(self, found: Commit, read: object) -> str:
        if found.step == self.unread and 9 not in self.read:
            await self.after.look_after(saved(9))
        return await super().check(found, read)


async def test_a_save_that_is_committed_while_a_former_one_is_read_back_is_read_back_too() -> None:
    store = SavedMeanwhile()
    store.may_end.set()
    store.after = look_after_commits(store)
    async with asyncio.timeout(10):
        await store.after.look_after(saved(8))
    assert store.read == [8, 5, 9, 5]
    assert store.after.good is not None
    assert store.after.good.step == 9


async def test_a_pinned_checkpoint_is_read_back_whatever_comes_after_it() -> None:
    store = SlowStore()
    after = look_after_commits(store)
    works = [asyncio.create_task(after.look_after(saved(1)))]
    async with asyncio.timeout(10):
        await store.begun.wait()
        saves = (saved(2, pins=["a"]), saved(3), saved(4))
        works += [asyncio.create_task(after.look_after(one)) for one in saves]
        await asyncio.sleep(0)
        store.may_end.set()
        await asyncio.gather(*works)
    assert store.read == [1, 2, 4]


class Alone:
    """Replaces the other pods."""

    def __init__(self, store: ObjectStore) -> None:
        self._read = read_alone(store)
        self.steps: list[int] = []

    async def read(self, found: Commit, chunks: Mapping[int, Chunk], uploaders: object) -> None:
        self.steps.append(found.step)
        await self._read(found, chunks)


async def test_old_checkpoints_are_retired_however_few_saves_each_coordinator_makes(
    tmp_path: Path,
) -> None:
    """On spot nodes, say. A coordinator knows only of its own read-backs which checkpoints are good."""
    store = UnreliableStore(open_store("memory://", "", {}))
    run, last = ARun(store, tmp_path), None
    read: Any = Alone(store)
    for step in (2, 4, 6, 8, 10):
        claimed = await run.claim(step, resume=last, job_uid=f"uid-{step}")
        last = await run.save(step, since=step - 2)
        assert last.token == claimed.token
        retention = Retention(store, run.log, keep=3)
        after = look_after_commits(retention, read)
        await after.look_after(Saved(commit=last))
        assert after.good is not None
        assert after.good.step == step
    assert [c.step for c in run.log.index.standing] == [6, 8, 10]
    assert read.steps == [2, 4, 6, 8, 6, 4, 10, 8, 6]


@pytest.mark.parametrize("keep", [1, 3])
async def test_no_former_checkpoint_is_read_back_if_enough_are_good_or_none_is_too_many(
    tmp_path: Path, keep: int
) -> None:
    store = UnreliableStore(open_store("memory://", "", {}))
    run = ARun(store, tmp_path)
    await run.claim(1)
    saves = [await run.save(step, since=step - 2) for step in (2, 4)]
    read: Any = Alone(store)
    after = look_after_commits(Retention(store, run.log, keep=keep), read)
    await after.look_after(Saved(commit=saves[-1]))
    assert read.steps == [4]

"""Read-backs after commits: one runs, and only the newest waits."""

import asyncio
import io
import time
from collections.abc import Sequence
from typing import Any

from agent.a_run import commit
from everstep_agent import logline
from everstep_agent.coordinator.post_commit import PostCommit, Saved
from everstep_agent.coordinator.read_back import ReadBacks
from everstep_contract.log import Commit

NOBODY = ReadBacks(list, lambda: None, time.monotonic)


class SlowStore:
    """Replaces the retention. Its reads wait for the test."""

    blocked = ""

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


def saved(step: int, pins: Sequence[str] = ()) -> Saved:
    return Saved(commit=commit(1, step, pins=pins))


async def persist(call: Any) -> str:
    return str(await call())


async def test_saves_that_come_faster_than_they_are_read_back_do_not_queue() -> None:
    store, said = SlowStore(), io.StringIO()
    retention: Any = store
    after = PostCommit(retention, NOBODY, good=None, persist=persist, line=logline.Log(said))
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


async def test_a_pinned_checkpoint_is_read_back_whatever_comes_after_it() -> None:
    store = SlowStore()
    retention: Any = store
    after = PostCommit(
        retention, NOBODY, good=None, persist=persist, line=logline.Log(io.StringIO())
    )
    works = [asyncio.create_task(after.look_after(saved(1)))]
    async with asyncio.timeout(10):
        await store.begun.wait()
        saves = (saved(2, pins=["a"]), saved(3), saved(4))
        works += [asyncio.create_task(after.look_after(one)) for one in saves]
        await asyncio.sleep(0)
        store.may_end.set()
        await asyncio.gather(*works)
    assert store.read == [1, 2, 4]

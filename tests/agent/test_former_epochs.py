"""A worker that continues in place begins its new epoch without what it did for the former one."""

import asyncio
import io
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from agent.a_run import stage
from agent.a_term import a_term
from agent.given import an_epoch, wanting
from everstep_agent import logline
from everstep_agent.checkpoint.ledger import Book
from everstep_agent.checkpoint.memory_tier import MemoryTier
from everstep_agent.checkpoint.parts import Part
from everstep_agent.peers.agent_report import State
from everstep_agent.pod.pod_saves import PodSaves
from everstep_agent.pod.save_queue import Listener
from everstep_agent.pod.worker import Worker
from everstep_agent.pod.worker_processes import Events, Place
from everstep_agent.pod.workers import WorkerSet
from everstep_contract import wire


def a_worker_process() -> Worker:
    return Worker(
        local=0, life=1, pid=7, page=cast(Any, None), page_path="", spawned_at=0.0, epoch=1
    )


@pytest.mark.parametrize("whole", [False, True])
async def test_a_save_that_is_staged_too_late_for_its_epoch_does_not_count_in_the_next(
    tmp_path: Path, whole: bool
) -> None:
    """It is deleted. A pin, or a member that leaves, would wait for it in vain."""
    listener = Listener(
        on_part=lambda part: None, on_failed=lambda staged, rank: None, on_held=lambda: None
    )
    saves = PodSaves(a_term(wanting(1)).context, Book(), listener, lambda: None)
    worker, path = a_worker_process(), tmp_path / "late"
    try:
        saves.enter(2, "token002-rest")
        path.write_bytes(b"state")
        late = wire.Staged(epoch=1, step=7, path=str(path), tensors=(), whole=whole)
        saves.take(worker, late, None)
        assert not path.exists()
        assert (worker.staged, worker.whole) == (0, 0)
    finally:
        await saves.close()


async def test_the_last_save_is_not_stored_again_if_the_former_epoch_has_committed_it(
    tmp_path: Path,
) -> None:
    """No later save would delete its chunks."""
    listener = Listener(
        on_part=lambda part: None, on_failed=lambda staged, rank: None, on_held=lambda: None
    )
    saves = PodSaves(a_term(wanting(1)).context, Book(), listener, lambda: None)
    worker, path = a_worker_process(), tmp_path / "again"
    try:
        saves.enter(2, "token002-rest")
        path.write_bytes(b"state")
        again = wire.Staged(epoch=2, step=7, path=str(path), tensors=())
        saves.take(worker, again, an_epoch(number=2, committed=7))
        assert not path.exists()
        assert not saves.busy
    finally:
        await saves.close()


class Saving:
    """A pod that uploads each save of its worker, and commits none."""

    def __init__(self, folder: Path) -> None:
        self.memory, self._folder = MemoryTier(folder / "memory"), folder
        self._parts = asyncio.Queue[Part]()
        listener = Listener(
            on_part=self._parts.put_nowait,
            on_failed=lambda staged, rank: None,
            on_held=lambda: None,
        )
        context = replace(a_term(wanting(1)).context, memory=self.memory)
        self.saves = PodSaves(context, Book(), listener, lambda: None)

    async def upload(self, epoch: int, step: int) -> None:
        frame = stage(self._folder, epoch=epoch, step=step, rank=0, world=1)
        self.saves.take(a_worker_process(), frame, None)
        async with asyncio.timeout(30):
            assert (await self._parts.get()).step == step

    def list_held(self) -> list[str]:
        return [Path(path).name for path in self.memory.list_paths()]

    def list_files(self) -> list[str]:
        return [path.name for path in self._folder.glob("*.staged")]


@pytest.fixture
async def saving(tmp_path: Path) -> AsyncIterator[Saving]:
    made = Saving(tmp_path)
    yield made
    await made.saves.close()


async def test_a_save_that_was_not_committed_does_not_take_the_room_of_later_saves(
    saving: Saving,
) -> None:
    """It is uploaded, and its epoch ended before the commit. The worker has room for two saves."""
    saving.saves.enter(1, "token001-rest")
    await saving.upload(1, 3)
    await saving.upload(1, 5)
    saving.saves.continue_in(an_epoch(number=2, committed=3))
    await saving.memory.freed()
    assert saving.list_held() == saving.list_files() == ["1-3-0-1.staged"]


async def test_a_save_that_others_have_staged_in_the_former_epoch_does_not_take_the_room_either(
    saving: Saving,
) -> None:
    """It stays incomplete. Each later save gets the memory of the one before it, until one is committed."""
    saving.saves.continue_in(an_epoch(number=2, token="token002-rest"))
    for step in (5, 7, 9):
        await saving.upload(2, step)
        assert saving.list_held() == [f"2-{step}-0-1.staged"]


@pytest.mark.parametrize("held", [False, True])
async def test_a_full_state_that_finds_no_room_is_saved_again_once_there_is_room(
    tmp_path: Path, held: bool
) -> None:
    """Copies of other pods' saves make room for it: it supersedes them."""
    failed, sent = asyncio.Queue[int](), asyncio.Queue[bytes]()
    listener = Listener(
        on_part=lambda part: None,
        on_failed=lambda staged, rank: failed.put_nowait(rank),
        on_held=lambda: None,
    )
    context = replace(a_term(wanting(1)).context, memory=MemoryTier(tmp_path))
    copy = context.memory.others.folder / ("b3-" + "0" * 64)
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_bytes(b"a part of another pod")
    saves = PodSaves(context, Book(), listener, lambda: None)
    worker = a_worker_process()
    worker.state = State.HELD if held else State.PARKED
    worker.writer = cast(Any, SimpleNamespace(is_closing=lambda: False, write=sent.put_nowait))
    try:
        saves.enter(1, "token001-rest")
        frame = wire.Staged(
            epoch=1, step=7, path="", tensors=(), whole=True, problem="no space left", full=True
        )
        saves.take(worker, frame, None)
        async with asyncio.timeout(30):
            order = wire.decode((await sent.get())[wire.LENGTH.size :]).frame
        assert not copy.exists(), "the order comes once there is room"
        assert order == (wire.SaveHeld if held else wire.Save)(epoch=1, step=7)
        assert failed.empty()
        saves.take(worker, frame, None)
        async with asyncio.timeout(30):
            assert await failed.get() == 0, "nothing is left that could make room"
        assert sent.empty()
    finally:
        await saves.close()


def test_a_save_that_failed_in_one_epoch_is_tried_again_in_the_next(tmp_path: Path) -> None:
    """Otherwise no later loss could be recovered from this rank's state."""
    do_nothing: Any = lambda *given: None  # noqa: E731
    workers = WorkerSet(
        spawner=cast(Any, None),
        place=Place(count=1, memory=str(tmp_path), environ={}),
        events=Events(
            on_frame=do_nothing,
            on_last_frame=do_nothing,
            on_death=do_nothing,
            on_gone=do_nothing,
            on_error=do_nothing,
        ),
        log=logline.Log(io.StringIO()),
    )
    worker = workers.current[0] = a_worker_process()
    worker.unsaved, worker.staged = True, 5
    order: Any = SimpleNamespace(epoch=2, rank=0)
    workers.continue_in((1,), lambda _: order)
    assert (worker.epoch, worker.unsaved, worker.staged) == (2, False, 0)

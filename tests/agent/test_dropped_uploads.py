"""A save whose memory is reused while it is uploaded."""

import asyncio
import io
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from agent.a_run import entry, stage
from agent.unreliable import UnreliableStore
from everstep_agent import logline
from everstep_agent.checkpoint.chunk_upload import Uploader
from everstep_agent.checkpoint.ledger import Book
from everstep_agent.checkpoint.memory_tier import MemoryTier
from everstep_agent.checkpoint.parts import Part
from everstep_agent.checkpoint.tiers import find_problem
from everstep_agent.checkpoint.unsent import Unsent, write_unsent
from everstep_agent.pod import save_queue
from everstep_agent.pod.save_queue import Listener, Uploads
from everstep_agent.storage import open_store
from everstep_contract.places import Place


class GatedStore(UnreliableStore):
    """A write waits until the gate is open."""

    def __init__(self) -> None:
        super().__init__(open_store("memory://", "", {}))
        self.begun, self.gate = asyncio.Event(), asyncio.Event()
        self.count, self.fails_from = 0, 0
        """From this write on, each one fails; 0: none does."""

    async def put(self, key: str, body: bytes | memoryview) -> None:
        self.begun.set()
        await self.gate.wait()
        self.count += 1
        self.away = 0 < self.fails_from <= self.count
        await super().put(key, bytes(body))


def list_files(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*") if path.is_file()]


def an_upload_queue(store: GatedStore, folder: Path, listener: Listener) -> Uploads:
    memory, line = MemoryTier(folder / "restore"), logline.Log(io.StringIO())
    return Uploads(Uploader(store, "token001-rest"), "uid", Book(), memory, listener, line)


async def test_of_a_part_with_nan_nothing_is_stored_and_only_the_newest_are_kept(
    tmp_path: Path,
) -> None:
    """No save may follow that is committed, so nothing would ever delete the chunks."""
    store, parts = GatedStore(), list[Part]()
    store.gate.set()
    heard = asyncio.Event()

    def on_part(part: Part) -> None:
        parts.append(part)
        heard.set()

    listener = Listener(on_part=on_part, on_failed=lambda staged, rank: None, on_held=lambda: None)
    uploads = an_upload_queue(store, tmp_path, listener)
    steps = list(range(2, 16, 2))
    try:
        for step in steps:
            staged = stage(tmp_path, epoch=1, step=step, rank=0, world=1)
            heard.clear()
            uploads.add(replace(staged, whole=False, not_finite=("w",)), 0)
            await asyncio.wait_for(heard.wait(), 30)
        assert [(part.step, part.not_finite) for part in parts] == [(s, ("w",)) for s in steps]
        assert [key[1] for key in uploads.parts] == steps[-save_queue.GIVEN_UP :]
        assert await store.list() == []
    finally:
        await uploads.close()


async def test_a_save_that_is_dropped_while_it_is_uploaded_is_never_reported(
    tmp_path: Path,
) -> None:
    """The next save may overwrite the memory during the upload, so the store may get a mix of both."""
    store, parts = GatedStore(), list[Part]()
    heard = asyncio.Event()

    def on_part(part: Part) -> None:
        parts.append(part)
        heard.set()

    listener = Listener(on_part=on_part, on_failed=lambda staged, rank: None, on_held=lambda: None)
    uploads = an_upload_queue(store, tmp_path, listener)
    try:
        staged = [stage(tmp_path, epoch=1, step=step, rank=1, world=2) for step in (3, 6)]
        uploads.add(staged[0], 1)
        await asyncio.wait_for(store.begun.wait(), 30)
        slot = os.open(staged[0].path, os.O_RDWR)  # as the worker, which has it mapped
        uploads.committed(1, 4)
        os.pwrite(slot, b"!" * 100, 0)  # the next save
        os.close(slot)
        uploads.add(staged[1], 1)
        store.gate.set()
        await asyncio.wait_for(heard.wait(), 30)
        assert [part.step for part in parts] == [6]
        assert [key[1] for key in uploads.parts] == [6]
    finally:
        await uploads.close()


async def test_what_the_store_took_of_a_dropped_save_is_not_used_for_the_next_try(
    tmp_path: Path,
) -> None:
    """Only of a save that still waits is it certain that the store took what was staged."""
    store, heard = GatedStore(), asyncio.Event()
    listener = Listener(
        on_part=lambda part: heard.set(), on_failed=lambda staged, rank: None, on_held=lambda: None
    )
    uploads = an_upload_queue(store, tmp_path, listener)
    uploads.book.add([entry(step) for step in (1, 2, 3)])
    try:
        staged = stage(tmp_path, epoch=1, step=3, rank=0, world=1)
        staged = replace(staged, whole=False)
        sound = await asyncio.to_thread(Path(staged.path).read_bytes)
        uploads.ask(3)
        uploads.add(replace(staged, near=True), 0)
        await asyncio.wait_for(store.begun.wait(), 30)
        slot = os.open(staged.path, os.O_RDWR)  # the worker has it mapped
        assert uploads.yield_room(0)
        os.pwrite(slot, b"!" * 100, 0)  # the next save
        os.close(slot)
        store.fails_from = 2  # it takes the tensors, and not the ledger
        store.gate.set()
        async with asyncio.timeout(30):
            while uploads.error is None:  # noqa: ASYNC110 a queue has no event for it
                await asyncio.sleep(0.01)
        store.fails_from = 0
        await asyncio.to_thread(Path(staged.path).write_bytes, sound)
        uploads.add(staged, 0)
        await asyncio.wait_for(heard.wait(), 30)
        (part,) = uploads.parts.values()
        for chunk in part.chunks:
            assert not find_problem(chunk, await store.get(chunk.key))
    finally:
        await uploads.close()


async def test_a_save_that_ends_with_its_epoch_leaves_no_record_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that writes it goes on: for seconds if the ledger is long."""
    began, gate, ended = threading.Event(), threading.Event(), threading.Event()

    def write(record: Unsent) -> dict[str, Place]:
        began.set()
        gate.wait(30)
        try:
            return write_unsent(record)
        finally:
            ended.set()

    monkeypatch.setattr(save_queue, "write_unsent", write)
    listener = Listener(
        on_part=lambda part: None, on_failed=lambda staged, rank: None, on_held=lambda: None
    )
    uploads = an_upload_queue(GatedStore(), tmp_path, listener)
    uploads.add(stage(tmp_path, epoch=1, step=3, rank=0, world=1), 0)
    assert await asyncio.to_thread(began.wait, 30)
    await uploads.close()
    gate.set()
    assert await asyncio.to_thread(ended.wait, 30)
    assert list_files(tmp_path) == []


async def test_newer_saves_do_not_take_the_place_of_the_one_that_is_uploaded(
    tmp_path: Path,
) -> None:
    """Otherwise a store slower than the interval of saves would never get a whole one."""
    store, parts = GatedStore(), list[Part]()
    heard, lost = asyncio.Event(), list[int]()

    def on_part(part: Part) -> None:
        if not part.problem:
            parts.append(part)
            heard.set()

    listener = Listener(
        on_part=on_part,
        on_failed=lambda staged, rank: lost.append(staged.step),
        on_held=lambda: None,
    )
    uploads = an_upload_queue(store, tmp_path, listener)
    try:
        staged = [stage(tmp_path, epoch=1, step=s, rank=1, world=2) for s in (3, 6, 9, 12)]
        uploads.add(staged[0], 1)
        await asyncio.wait_for(store.begun.wait(), 30)
        for later in staged[1:]:
            uploads.add(later, 1)
        assert lost == [6, 9]
        store.gate.set()
        await asyncio.wait_for(heard.wait(), 30)
        assert parts[0].step == 3
    finally:
        await uploads.close()


async def test_no_rank_of_a_pod_sends_again_what_its_verified_save_holds(tmp_path: Path) -> None:
    """For example frozen layers. The parts that other ranks sent for the same step change nothing."""
    store, heard = GatedStore(), asyncio.Queue[Part]()
    store.gate.set()
    listener = Listener(
        on_part=heard.put_nowait, on_failed=lambda staged, rank: None, on_held=lambda: None
    )
    uploads = an_upload_queue(store, tmp_path, listener)
    try:
        for step, shown in ((3, 3), (6, 3)):
            folder = tmp_path / str(step)
            folder.mkdir()
            parts = []
            for rank in (0, 1):
                staged = stage(folder, epoch=1, step=shown, rank=rank, world=2)
                uploads.add(replace(staged, step=step), rank)
                parts.append(await asyncio.wait_for(heard.get(), 30))
            if step == 3:
                uploads.committed(1, 3)
                uploads.verified(1, 3)
                store.calls.clear()
        sent = [key for verb, key in store.calls if verb == "put"]
        assert not [key for key in sent if key in {c.key for c in parts[1].chunks}]
        assert parts[1].chunks
        assert all("/0000000003/" in chunk.key for chunk in parts[1].chunks)
    finally:
        await uploads.close()

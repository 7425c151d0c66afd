"""This pod's memory: its staged saves, which of them the next agent adopts, and how a checkpoint is restored from the
nearest tier that holds it.
"""

import asyncio
import io
import os
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from agent.a_run import ARun
from agent.restored import fetch
from agent.tier_given import (
    BODY,
    OWNER,
    TOKEN,
    a_chunk,
    a_save,
    hold_in_the_middle,
    place_of,
    serving,
)
from agent.unreliable import UnreliableStore
from everstep_agent import logline
from everstep_agent.agent import count_incarnation
from everstep_agent.checkpoint import memory_tier
from everstep_agent.checkpoint.chunk_upload import Uploader
from everstep_agent.checkpoint.files import PART
from everstep_agent.checkpoint.folder_tier import FolderTier
from everstep_agent.checkpoint.keeping import Resumed
from everstep_agent.checkpoint.ledger import Book
from everstep_agent.checkpoint.manifests import Broken
from everstep_agent.checkpoint.memory_tier import MemoryTier
from everstep_agent.checkpoint.tiers import find_problem
from everstep_agent.peers.client import Pool
from everstep_agent.peers.peer_tier import PeerTier, choose_order
from everstep_agent.pod import save_queue
from everstep_agent.pod.save_queue import Listener, Uploads
from everstep_agent.storage import ObjectStore, open_store
from everstep_contract import codec
from everstep_contract.manifest import Chunk
from everstep_contract.places import Places
from everstep_contract.wire import Staged

OTHER = b"another" * 900


@pytest.fixture
def bad_day() -> UnreliableStore:
    return UnreliableStore(open_store("memory://", "", {}))


@pytest.fixture
async def pool() -> AsyncIterator[Pool]:
    found = Pool(TOKEN)
    yield found
    await found.close()


async def is_right(memory: MemoryTier, chunk: Chunk) -> bool:
    return not find_problem(chunk, await memory.get(chunk))


# --- own saves ------------------------------------------------------------------------------------


async def test_what_was_read_of_a_file_that_is_released_meanwhile_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker stages its next save in the same memory, so the bytes may be of both."""
    memory = MemoryTier(tmp_path)
    path = hold_in_the_middle(memory, tmp_path, BODY)
    loop, begun, released = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    def read(*span: int) -> bytes:
        loop.call_soon_threadsafe(begun.set)
        released.wait(30)
        return OTHER

    monkeypatch.setattr(memory_tier, "read_file", read)
    reading = asyncio.create_task(memory.get(a_chunk()))
    await begun.wait()
    memory.release(str(path))
    released.set()
    assert await reading is None


async def test_a_staged_file_is_held_until_a_newer_save_is_committed(tmp_path: Path) -> None:
    memory = MemoryTier(tmp_path)
    path = hold_in_the_middle(memory, tmp_path, BODY, step=3)
    hold_in_the_middle(memory, tmp_path, OTHER, step=4)
    memory.note_commit(3)
    assert await is_right(memory, a_chunk())
    memory.note_commit(4)
    assert not path.exists()
    assert not await is_right(memory, a_chunk())
    assert memory.find(a_chunk().digest) is None
    assert await is_right(memory, a_chunk(OTHER))


def test_a_staged_file_is_deleted_even_if_no_thread_can_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script's data workers take all processes that the container may have. The agent must not end of that."""

    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    memory = MemoryTier(tmp_path)
    path = hold_in_the_middle(memory, tmp_path, BODY, step=3)
    monkeypatch.setattr(threading.Thread, "start", start)
    before = set(os.listdir("/proc/self/fd"))
    memory.note_commit(4)
    assert not path.exists()
    assert set(os.listdir("/proc/self/fd")) == before


def an_upload_queue(
    memory: MemoryTier, on_failed: Callable[[Staged, int], None] = lambda staged, rank: None
) -> Uploads:
    return Uploads(
        Uploader(open_store("memory://", "", {}), "token001-rest"),
        "uid",
        Book(),
        memory,
        Listener(
            on_part=lambda part: None,
            on_failed=on_failed,
            on_held=lambda: None,
        ),
        logline.Log(io.StringIO()),
    )


async def test_the_event_loop_does_not_wait_for_the_memory_of_older_saves_to_be_freed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That takes the kernel a tenth of a second and more for each GiB."""
    deleted, began, unlink = list[threading.Thread](), threading.Event(), Path.unlink

    def note(path: Path, missing_ok: bool = False) -> None:
        deleted.append(threading.current_thread())
        began.set()
        unlink(path, missing_ok)

    memory = MemoryTier(tmp_path / "restore")
    await memory.keep(OWNER, [a_save(BODY, step=3)], 0)
    await memory.put(a_chunk(), BODY)
    monkeypatch.setattr(Path, "unlink", note)
    memory.note_commit(4)
    assert not await memory.list()
    await asyncio.to_thread(began.wait, 10)
    assert threading.current_thread() not in deleted
    for thread in deleted:
        await asyncio.to_thread(thread.join, 10)
    assert [p.name for p in (tmp_path / "restore").iterdir()] == ["chunks"]


async def test_nor_for_that_of_the_pods_own_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their names go at once: a worker finds a slot free again by the number of its names."""
    freed, close = dict[int, threading.Thread](), os.close

    def note(descriptor: int) -> None:
        freed[os.fstat(descriptor).st_ino] = threading.current_thread()
        close(descriptor)

    memory = MemoryTier(tmp_path / "restore")
    staged = hold_in_the_middle(memory, tmp_path, BODY)
    inode = staged.stat().st_ino
    monkeypatch.setattr(os, "close", note)
    memory.release_before(4)
    assert not staged.exists()
    await memory.freed()
    assert freed[inode] is not threading.current_thread()


async def test_all_but_the_pods_own_saves_is_deleted_beside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deleted, unlink = list[threading.Thread](), Path.unlink

    def note(path: Path, missing_ok: bool = False) -> None:
        deleted.append(threading.current_thread())
        unlink(path, missing_ok)

    memory = MemoryTier(tmp_path / "restore")
    await memory.keep(OWNER, [a_save(BODY, step=3)], 0)
    await memory.put(a_chunk(), BODY)
    monkeypatch.setattr(Path, "unlink", note)
    assert await memory.drop_others()
    assert not await memory.list()
    assert deleted
    assert threading.current_thread() not in deleted
    assert not await memory.drop_others()


async def test_a_commit_does_not_wait_while_the_older_copies_of_another_pod_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop waits for this call. An agent that answers nobody for long counts as silent."""
    began, go_on, unlink = threading.Event(), threading.Event(), Path.unlink

    def take_long(path: Path, missing_ok: bool = False) -> None:
        if not path.name.endswith(PART):
            began.set()
            go_on.wait(60)
        unlink(path, missing_ok)

    memory = MemoryTier(tmp_path / "restore")
    await memory.keep(OWNER, [a_save(BODY, step=3)], 0)
    await memory.put(a_chunk(), BODY)
    monkeypatch.setattr(Path, "unlink", take_long)
    copying = asyncio.create_task(memory.keep(OWNER, [a_save(OTHER, step=6)], 6))
    try:
        await asyncio.to_thread(began.wait, 60)
        await asyncio.wait_for(asyncio.to_thread(memory.others.forget_before, 6), 20)
        assert not copying.done()
    finally:
        go_on.set()
    await copying
    assert not await memory.list()


async def test_the_memory_that_a_killed_agent_was_freeing_is_freed_before_a_restore(
    tmp_path: Path,
) -> None:
    """It may be the memory that the restore needs."""
    memory = MemoryTier(tmp_path / "restore")
    left = tmp_path / "restore/chunks.gone/0123456789abcdef"
    left.parent.mkdir(parents=True)
    left.write_bytes(BODY)
    await memory.rewind(Resumed(epoch=1, step=3))
    assert not left.exists()


async def test_a_chunk_is_found_where_it_still_is(tmp_path: Path) -> None:
    """It was restored; the next save staged the same bytes; then the restored file was deleted."""
    memory = MemoryTier(tmp_path / "restore")
    await memory.keep(OWNER, [a_save(BODY, step=3)], 0)
    await memory.put(a_chunk(), BODY)
    memory.note(a_chunk(), {})
    path = hold_in_the_middle(memory, tmp_path, BODY, step=4)
    memory.note_commit(4)
    place = memory.find(a_chunk().digest)
    assert place is not None
    assert place.path == str(path)
    assert await is_right(memory, a_chunk())


async def test_a_commit_deletes_the_older_chunks_that_came_from_elsewhere(tmp_path: Path) -> None:
    """Nobody may copy to this pod, so no other pod tells it what is no longer needed."""
    memory = MemoryTier(tmp_path / "restore")
    await memory.keep(OWNER, [a_save(BODY, step=3)], 0)
    await memory.put(a_chunk(), BODY)
    memory.note(a_chunk(), {})
    memory.note_commit(3)
    assert memory.find(a_chunk().digest) is not None
    memory.note_commit(4)
    assert memory.find(a_chunk().digest) is None
    assert not await memory.list()


async def test_an_upload_that_ends_in_an_unexpected_error_is_given_up_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the job would wait for this part without end."""
    failed, told = list[int](), asyncio.Event()

    async def cut(staged: Staged) -> list[object]:
        raise RuntimeError("can't start new thread")

    def note(staged: Staged, rank: int) -> None:
        failed.append(rank)
        told.set()

    monkeypatch.setattr(save_queue, "cut_file", cut)
    uploads = an_upload_queue(MemoryTier(tmp_path / "restore"), on_failed=note)
    try:
        uploads.add(Staged(epoch=1, step=3, path=str(tmp_path / "part"), tensors=()), 0)
        await asyncio.wait_for(told.wait(), 30)
        (part,) = uploads.parts.values()
        assert part.problem == "RuntimeError: can't start new thread"
        assert failed == [0]
        assert not uploads.busy
    finally:
        await uploads.close()


async def test_a_copy_that_has_no_room_gets_that_of_the_oldest_save(tmp_path: Path) -> None:
    memory = MemoryTier(tmp_path / "restore")
    await memory.keep(OWNER, [a_save(BODY)], 0)
    await memory.put(a_chunk(), BODY)
    paths = [hold_in_the_middle(memory, tmp_path, BODY, step=s) for s in (3, 6)]
    uploads = an_upload_queue(memory)
    try:
        for step, left in ((9, [False, True]), (12, [False, False])):
            none = Staged(epoch=1, step=step, path="", tensors=(), problem="full", full=True)
            uploads.give_up(none, 0, "full")
            assert [p.exists() for p in paths] == left
            assert await memory.list(), "copies of other pods' saves are deleted last"
        uploads.give_up(none, 0, "full")
        assert await memory.changed.until(lambda: not memory.others.list_now(), 30)
        assert not await memory.list()
    finally:
        await uploads.close()


async def test_the_next_agent_of_a_pod_adopts_what_was_held(tmp_path: Path) -> None:
    staging = tmp_path / "staging"
    staging.mkdir()
    memory = MemoryTier(tmp_path / "restore")
    path = hold_in_the_middle(memory, staging, BODY)
    await memory.keep(OWNER, [a_save(OTHER)], 0)
    await memory.put(a_chunk(OTHER), OTHER)
    (staging / "being-written.part").write_bytes(b"1")
    (staging / "slot-1-1").write_bytes(b"2")
    assert count_incarnation(str(tmp_path)) == 1
    assert set(staging.iterdir()) == {path, path.with_name(path.name + ".held")}
    adopted = MemoryTier(tmp_path / "restore", staging)
    assert adopted.find(a_chunk().digest) == place_of(path, BODY)
    assert await adopted.get(a_chunk()) == BODY
    assert [save.key for save in adopted.list_saves()] == [(1, 3)]
    await adopted.keep("slot-2", [], 0)
    assert await is_right(adopted, a_chunk(OTHER)), "copies of others' saves are adopted"


@pytest.mark.parametrize(
    "note",
    [
        b"",
        b"[]",
        b'{"step": 1}',
        b'{"epoch": 1, "step": "x", "chunks": {}}',
        b'{"epoch": 1, "step": 1, "chunks": 3}',
    ],
)
async def test_a_note_that_cannot_be_read_is_passed_over(tmp_path: Path, note: bytes) -> None:
    path = hold_in_the_middle(MemoryTier(tmp_path), tmp_path, BODY)
    path.with_name(path.name + ".held").write_bytes(note)
    assert not await is_right(MemoryTier(tmp_path, tmp_path), a_chunk())


async def test_a_staged_file_that_was_damaged_is_not_adopted(tmp_path: Path) -> None:
    path = hold_in_the_middle(MemoryTier(tmp_path), tmp_path, BODY)
    with path.open("r+b") as file:
        file.seek(100)
        file.write(b"\0\0\0")
    assert not await is_right(MemoryTier(tmp_path, tmp_path), a_chunk())


async def test_a_staged_file_of_another_epochs_chain_is_deleted(tmp_path: Path) -> None:
    memory = MemoryTier(tmp_path)
    kept = hold_in_the_middle(memory, tmp_path, BODY, step=3)
    void = [
        hold_in_the_middle(memory, tmp_path, OTHER, step=s, epoch=e) for e, s in [(1, 6), (7, 3)]
    ]
    await memory.rewind(Resumed(epoch=1, step=3))
    assert kept.exists()
    assert not any(path.exists() for path in void)
    assert [save.key for save in memory.list_saves()] == [(1, 3)]


# --- a whole checkpoint ---------------------------------------------------------------------------


def test_the_pods_behind_this_one_are_asked_first() -> None:
    assert choose_order(["a", "b", "c", "d"], "c") == ["d", "a", "b"]
    assert choose_order(["a", "b"], "z") == ["a", "b"]


async def a_checkpoint(folder: Path, store: ObjectStore) -> tuple[ARun, list[Chunk]]:
    run = ARun(store, folder / "staged")
    await run.claim(1)
    await run.save(2)
    fetched = await fetch(store, run.log.commits[-1], folder / "first")
    return run, list(fetched.needed.values())


async def test_what_a_peer_holds_is_not_read_from_the_store(
    bad_day: UnreliableStore, tmp_path: Path, pool: Pool
) -> None:
    run, chunks = await a_checkpoint(tmp_path, bad_day)
    async with serving(MemoryTier(tmp_path / "first")) as address:
        bad_day.calls.clear()
        gone = PeerTier(pool, "127.0.0.1:9")
        found = await fetch(
            bad_day,
            run.log.commits[-1],
            tmp_path / "second",
            nearer=[gone, PeerTier(pool, address)],
        )
    assert found.sources == {"peer": len(chunks)}
    assert bad_day.calls == []


async def test_what_the_disk_holds_is_read_from_there_first(
    bad_day: UnreliableStore, tmp_path: Path, pool: Pool
) -> None:
    run, chunks = await a_checkpoint(tmp_path, bad_day)
    memory = MemoryTier(tmp_path / "first")
    disk = FolderTier(tmp_path / "disk", "disk", sync=True)
    save = a_save(epoch=1, step=2)
    await disk.keep(OWNER, [type(save)(epoch=1, step=2, chunks=tuple(chunks))], 0)
    for chunk in chunks:
        await disk.put(chunk, await memory.get(chunk) or b"")
    async with serving(memory) as address:
        nearer = [FolderTier(tmp_path / "disk", "disk", sync=True), PeerTier(pool, address)]
        found = await fetch(bad_day, run.log.commits[-1], tmp_path / "second", nearer=nearer)
    assert found.sources == {"disk": len(chunks)}


async def test_a_disk_of_another_run_is_not_believed(tmp_path: Path) -> None:
    ours = FolderTier(tmp_path, "disk", run="s3://bucket/ours")
    await ours.keep(OWNER, [a_save(BODY)], 0)
    assert set(ours.read_notes()) == {OWNER}
    assert FolderTier(tmp_path, "disk", run="s3://bucket/theirs").read_notes() == {}


async def test_a_chunk_that_is_damaged_at_a_peer_is_read_from_the_store(
    bad_day: UnreliableStore, tmp_path: Path, pool: Pool
) -> None:
    run, chunks = await a_checkpoint(tmp_path, bad_day)
    (tmp_path / "first/chunks" / chunks[0].digest).write_bytes(b"\0" * chunks[0].bytes)
    async with serving(MemoryTier(tmp_path / "first")) as address:
        found = await fetch(
            bad_day, run.log.commits[-1], tmp_path / "second", nearer=[PeerTier(pool, address)]
        )
    assert found.sources == {"peer": len(chunks) - 1, "store": 1}
    body = (tmp_path / "second/chunks" / chunks[0].digest).read_bytes()
    assert find_problem(chunks[0], body) == ""


async def test_a_manifest_that_is_damaged_in_memory_is_read_from_the_store(
    bad_day: UnreliableStore, tmp_path: Path
) -> None:
    run, chunks = await a_checkpoint(tmp_path, bad_day)
    commit = run.log.commits[-1]
    (tmp_path / "first/chunks" / commit.digest).write_bytes(b'{"version": 1}')
    bad_day.calls.clear()
    found = await fetch(bad_day, commit, tmp_path / "first")
    assert bad_day.calls == [("get", commit.manifest)]
    assert found.sources == {"memory": len(chunks)}


async def test_a_chunk_that_the_store_has_lost_comes_from_a_peer(
    bad_day: UnreliableStore, tmp_path: Path, pool: Pool
) -> None:
    run, chunks = await a_checkpoint(tmp_path, bad_day)
    await bad_day.delete(chunks[0].key)
    with pytest.raises(Broken, match="is gone"):
        await fetch(bad_day, run.log.commits[-1], tmp_path / "alone")
    async with serving(MemoryTier(tmp_path / "first")) as address:
        found = await fetch(
            bad_day, run.log.commits[-1], tmp_path / "second", nearer=[PeerTier(pool, address)]
        )
    assert found.sources == {"peer": len(chunks)}


async def test_what_is_staged_here_is_used_where_it_lies(
    bad_day: UnreliableStore, tmp_path: Path
) -> None:
    run, chunks = await a_checkpoint(tmp_path, bad_day)
    memory = MemoryTier(tmp_path / "second")
    body = (tmp_path / "first/chunks" / chunks[0].digest).read_bytes()
    path = hold_in_the_middle(memory, tmp_path, body, step=2)
    found = await fetch(bad_day, run.log.commits[-1], tmp_path / "second", memory=memory)
    assert found.sources["memory"] == 1
    assert not (tmp_path / "second/chunks" / chunks[0].digest).exists()
    assert found.places[chunks[0].digest].path == str(path)
    assert codec.loads(Places, found.places_path.read_bytes()).chunks == found.places

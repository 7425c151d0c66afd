"""What a pod finds of a save that another pod had staged and copied, but not uploaded."""

import asyncio
import io
from dataclasses import replace
from pathlib import Path

import pytest

from agent.a_run import entry, stage
from agent.given import an_epoch
from everstep_agent import logline
from everstep_agent.checkpoint import unsent
from everstep_agent.checkpoint.chunk_upload import Uploader
from everstep_agent.checkpoint.chunking import BadStaging
from everstep_agent.checkpoint.cutting import cut_file
from everstep_agent.checkpoint.folder_tier import FolderTier
from everstep_agent.checkpoint.keeping import Save, merge_saves
from everstep_agent.checkpoint.ledger import Book
from everstep_agent.checkpoint.memory_tier import MemoryTier
from everstep_agent.checkpoint.parts import Part
from everstep_agent.checkpoint.unsent import Unsent
from everstep_agent.pod.save_queue import Listener, Uploads
from everstep_agent.pod.unfinished_saves import (
    UnfinishedSaves,
    choose_name,
    choose_open,
    choose_unsent,
)
from everstep_agent.storage import open_store
from everstep_contract import codec
from everstep_contract.manifest import Chunk
from everstep_contract.wire import Staged, StagedTensor

BODY = bytes(range(64))
JOB = "uid"


@pytest.fixture
def disk(tmp_path: Path) -> FolderTier:
    return FolderTier(tmp_path / "disk", "disk", run="a-run", sync=True)


async def copy_one(folder: Path, disk: FolderTier, job: str = JOB) -> Unsent:
    """A staged save of one tensor, and its copy in `disk`."""
    file = folder / "staged.part"
    file.write_bytes(BODY)
    tensor = StagedTensor(name="w", dtype="uint8", shape=(64,), offsets=(0,), lengths=(64,), at=0)
    staged = Staged(epoch=1, step=3, path=str(file), tensors=(tensor,))
    names = tuple(cut.digest for cut in await cut_file(staged))
    own = Unsent(staged=staged, rank=0, bytes=len(BODY), chunks=names, job=job)
    ((record, place),) = unsent.write_unsent(own).items()
    chunks = (
        Chunk(digest=names[0], key="", bytes=len(BODY)),
        Chunk(digest=record, key="", bytes=place.bytes),
    )
    await disk.keep("slot-0", [Save(epoch=1, step=3, chunks=chunks, unsent=(record,))], 0)
    await disk.put(chunks[0], BODY)
    record_body = await asyncio.to_thread(Path(place.path).read_bytes)
    await disk.put(chunks[1], record_body)
    return own


async def test_a_copied_save_becomes_a_staged_file_again(tmp_path: Path, disk: FolderTier) -> None:
    own = await copy_one(tmp_path, disk)
    (found,) = unsent.read_copied(disk)
    assert found == replace(own, staged=replace(own.staged, path=""))
    path = tmp_path / "again.part"
    assert unsent.rebuild(found, disk, path).staged.path == str(path)
    assert path.read_bytes() == BODY


def test_the_record_of_a_long_ledger_is_encoded_piece_by_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent's event loop stands still while one piece is encoded, in whichever thread."""
    pieces, dumps = list[int](), codec.dumps

    def note(value: object) -> bytes:
        raw = dumps(value)
        pieces.append(len(raw))
        return raw

    staged = Staged(epoch=1, step=50, path=str(tmp_path / "s.part"), tensors=(), lead=True)
    own = Unsent(staged=staged, rank=0, entries=tuple(entry(step) for step in range(1, 51)))
    for record in (own, replace(own, entries=())):
        assert unsent.encode(record) == codec.dumps(record)
    monkeypatch.setattr(codec, "dumps", note)
    ((_, place),) = unsent.write_unsent(own).items()
    assert max(pieces) < place.bytes / 5


async def test_a_save_that_was_not_copied_completely_is_not_offered(
    tmp_path: Path, disk: FolderTier
) -> None:
    own = await copy_one(tmp_path, disk)
    disk.remove(own.chunks[0])
    assert unsent.read_copied(disk) == ()


async def test_a_damaged_copy_is_not_believed(tmp_path: Path, disk: FolderTier) -> None:
    own = await copy_one(tmp_path, disk)
    (found,) = unsent.read_copied(disk)
    (disk.folder / own.chunks[0]).write_bytes(BODY[:-1] + b"x")
    with pytest.raises(BadStaging, match="is corrupt"):
        unsent.rebuild(found, disk, tmp_path / "again.part")
    (record,) = disk.list_now() - set(own.chunks)
    (disk.folder / record).write_bytes(b"{}")
    assert unsent.read_copied(disk) == ()


class Queue:
    """An upload queue, and the parts that it reports."""

    def __init__(self, memory: MemoryTier) -> None:
        self.parts: asyncio.Queue[Part] = asyncio.Queue()
        self.held = asyncio.Event()
        listener = Listener(
            on_part=self.parts.put_nowait,
            on_failed=lambda staged, rank: None,
            on_held=self.held.set,
        )
        self.said = io.StringIO()
        uploader = Uploader(open_store("memory://", "", {}), "token001-rest")
        line = logline.Log(self.said)
        self.uploads = Uploads(uploader, JOB, Book(), memory, listener, line)


async def test_a_copy_that_cannot_be_used_costs_no_save_that_is_here(
    tmp_path: Path, disk: FolderTier
) -> None:
    """A save that is still to be given to the queue looks like one that nobody needs."""
    staging = tmp_path / "staging"
    staging.mkdir()
    former = Queue(MemoryTier(tmp_path / "restore"))
    former.uploads.add(replace(stage(staging, epoch=1, step=3, rank=1, world=2), near=True), rank=1)
    await asyncio.wait_for(former.held.wait(), 30)
    await former.uploads.stop()

    own = await copy_one(tmp_path, disk)
    (disk.folder / own.chunks[0]).write_bytes(BODY[:-1] + b"x")
    unfinished = UnfinishedSaves(staging, [disk], JOB)
    await unfinished.find()
    assert sorted(save.rank for save in unfinished.list()) == [0, 1]
    queue = Queue(MemoryTier(tmp_path / "restore", staging))
    try:
        queue.uploads.ask(3)
        unfinished.upload(an_epoch(number=1, kept=3), queue.uploads, lambda: True)
        part = await asyncio.wait_for(queue.parts.get(), 30)
        assert (part.rank, part.problem) == (1, "")
        assert f"{own.chunks[0]} is corrupt" in queue.said.getvalue()
        assert [save.rank for save in unfinished.list()] == [1], "its owner may still upload it"
        assert queue.parts.empty()
    finally:
        await unfinished.close()
        await queue.uploads.close()


async def test_a_copy_that_is_rebuilt_too_late_is_not_left_in_memory(
    tmp_path: Path, disk: FolderTier
) -> None:
    staging = tmp_path / "staging"
    staging.mkdir()
    await copy_one(tmp_path, disk)
    unfinished = UnfinishedSaves(staging, [disk], JOB)
    await unfinished.find()
    asked, queue = asyncio.Event(), Queue(MemoryTier(tmp_path / "restore", staging))

    def is_wanted() -> bool:
        asked.set()
        return False

    try:
        unfinished.upload(an_epoch(number=1, kept=3), queue.uploads, is_wanted)
        await asyncio.wait_for(asked.wait(), 30)
        await asyncio.gather(*unfinished._tasks)
        assert list(staging.iterdir()) == []
        assert queue.parts.empty()
    finally:
        await unfinished.close()
        await queue.uploads.close()


@pytest.mark.parametrize(
    ("job", "ranks"),
    [
        pytest.param(JOB, [0, 1], id="its own job's"),
        pytest.param("", [0, 1], id="an older version's"),
        pytest.param("other", [1], id="a former job's of the same name"),
    ],
)
async def test_a_save_of_a_former_job_is_not_finished(
    tmp_path: Path, disk: FolderTier, job: str, ranks: list[int]
) -> None:
    """If its run was deleted, the new one counts epochs and steps from the start again."""
    staging = tmp_path / "staging"
    staging.mkdir()
    queue = Queue(MemoryTier(tmp_path / "restore"))
    queue.uploads.add(stage(staging, epoch=1, step=3, rank=1, world=2), rank=1)
    await asyncio.wait_for(queue.held.wait(), 30)
    await queue.uploads.stop()
    await copy_one(tmp_path, disk, job)
    unfinished, known = UnfinishedSaves(staging, [disk], JOB), asyncio.Event()
    await unfinished.find()
    assert sorted(save.rank for save in unfinished.list()) == ranks
    unfinished.look_for(1, known.set)
    await asyncio.wait_for(known.wait(), 30)
    assert [save.rank for save in unfinished.list()] == [r for r in ranks if r != 1]
    await unfinished.close()


def test_two_ranks_of_a_pod_keep_what_each_needs() -> None:
    chunks = [Chunk(digest=name, key="", bytes=1) for name in "abcd"]
    saves = [
        Save(epoch=1, step=3, chunks=tuple(chunks[:2]), unsent=("b",)),
        Save(epoch=1, step=3, chunks=tuple(chunks[2:]), unsent=("d",)),
    ]
    assert merge_saves(saves) == (Save(epoch=1, step=3, chunks=tuple(chunks), unsent=("b", "d")),)


def of(step: int, rank: int = 0, epoch: int = 3) -> Unsent:
    return Unsent(staged=Staged(epoch=epoch, step=step, path="", tensors=()), rank=rank)


def test_the_nearest_of_several_copies_is_taken(disk: FolderTier) -> None:
    other = FolderTier(disk.folder, "other")
    near = of(6)
    found = choose_unsent([near], [(of(6), disk), (of(9), disk), (of(9), other)])
    assert {(u.staged.step, t) for u, t in found} == {(6, None), (9, disk)}
    assert any(u is near for u, _ in found)


def test_the_newest_two_of_each_rank_are_uploaded_the_oldest_first(disk: FolderTier) -> None:
    level = an_epoch(number=3, committed=4)
    saves = [of(12), of(4), of(9), of(6), of(9, rank=1), of(15, epoch=2)]
    found = choose_open([(u, disk) for u in saves], level)
    assert [(u.rank, u.staged.step) for u, _ in found] == [(0, 9), (0, 12), (1, 9)]


def test_no_two_saves_get_the_same_staged_file() -> None:
    whole = replace(of(6), staged=replace(of(6).staged, whole=True))
    saves = [of(6), of(9), of(6, rank=1), of(6, epoch=2), whole]
    assert len({choose_name(each) for each in saves}) == len(saves)

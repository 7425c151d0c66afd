import contextlib
from pathlib import Path

import pytest

from agent.a_run import COLUMNS, ROW_BYTES, ROWS, ARun, content
from agent.restored import fetch, restore_newest
from agent.unreliable import NarrowStore, UnreliableStore
from everstep_agent.checkpoint.keeping import Resumed
from everstep_agent.checkpoint.manifests import Broken
from everstep_agent.checkpoint.memory_tier import MemoryTier
from everstep_agent.checkpoint.restore import Fetched, Fetcher
from everstep_agent.runlog.run_log import RunLog
from everstep_agent.storage import ObjectStore, open_store
from everstep_agent.storage.errors import Unreachable
from everstep_contract import manifest as manifests
from everstep_contract.places import Place


def read_w(fetched: Fetched) -> bytes:
    """Assemble the tensor `w` from the fetched files, as a worker does."""
    loaded = manifests.decode(fetched.manifest_path.read_bytes())
    (tensor,) = [t for t in loaded.tensors if t.name == "w"]
    whole = bytearray(ROWS * ROW_BYTES)
    for piece in tensor.pieces:
        assert piece.lengths[1] == COLUMNS
        size = piece.lengths[0] * ROW_BYTES
        place = fetched.places[piece.chunk]
        chunk = Path(place.path).read_bytes()[place.start : place.start + place.bytes]
        start = piece.offsets[0] * ROW_BYTES
        whole[start : start + size] = chunk[piece.at : piece.at + size]
    return bytes(whole)


def damage(place: Place) -> None:
    Path(place.path).write_bytes(b"\0" * place.bytes)


async def a_run_with_three_checkpoints(store: ObjectStore, folder: Path) -> ARun:
    run = ARun(store, folder / "staged")
    await run.claim(1)
    for step in (2, 4, 6):
        await run.save(step, since=step - 2)
    return run


@pytest.fixture
def bad_day() -> UnreliableStore:
    return UnreliableStore(open_store("memory://", "", {}))


async def test_the_newest_checkpoint_comes_back_byte_for_byte(
    store: ObjectStore, tmp_path: Path
) -> None:
    await a_run_with_three_checkpoints(store, tmp_path)
    run_log = RunLog(store)
    await run_log.refresh()
    restored = await restore_newest(store, run_log, tmp_path / "memory")
    assert restored.skipped == ()
    assert restored.fetched is not None
    assert restored.fetched.commit.step == 6
    assert read_w(restored.fetched) == content(6)


async def test_a_run_without_a_checkpoint_starts_at_the_beginning(
    bad_day: UnreliableStore, tmp_path: Path
) -> None:
    run = ARun(bad_day, tmp_path)
    await run.claim(1)
    restored = await restore_newest(bad_day, run.log, tmp_path / "memory")
    assert (restored.fetched, restored.skipped) == (None, ())


async def damage_chunk(run: ARun, store: UnreliableStore) -> str:
    fetched = await fetch(store, run.log.commits[-1], run.folder / "look")
    store.corrupt = {next(iter(fetched.needed.values())).key}
    return "is corrupt: BLAKE3"


async def remove_chunk(run: ARun, store: UnreliableStore) -> str:
    fetched = await fetch(store, run.log.commits[-1], run.folder / "look")
    await store.delete(list(fetched.needed.values())[-1].key)
    return "is gone"


async def cut_chunk(run: ARun, store: UnreliableStore) -> str:
    fetched = await fetch(store, run.log.commits[-1], run.folder / "look")
    chunk = next(iter(fetched.needed.values()))
    await store.put(chunk.key, (await store.get(chunk.key))[:-1])
    return f"has {chunk.bytes - 1} bytes, not {chunk.bytes}"


async def damage_manifest(run: ARun, store: UnreliableStore) -> str:
    store.corrupt = {run.log.commits[-1].manifest}
    return "was changed"


async def remove_manifest(run: ARun, store: UnreliableStore) -> str:
    await store.delete(run.log.commits[-1].manifest)
    return "is gone"


@pytest.mark.parametrize(
    "damage", [damage_chunk, remove_chunk, cut_chunk, damage_manifest, remove_manifest]
)
async def test_a_broken_checkpoint_is_skipped_and_named(
    bad_day: UnreliableStore, tmp_path: Path, damage: object
) -> None:
    run = await a_run_with_three_checkpoints(bad_day, tmp_path)
    said = await damage(run, bad_day)  # type: ignore[operator]
    restored = await restore_newest(bad_day, run.log, tmp_path / "memory")
    assert restored.fetched is not None
    assert restored.fetched.commit.step == 4
    assert read_w(restored.fetched) == content(4)
    (skipped,) = restored.skipped
    assert skipped.commit.step == 6
    assert said in skipped.reason


async def test_what_was_damaged_on_its_way_is_read_again(
    bad_day: UnreliableStore, tmp_path: Path
) -> None:
    """Otherwise a single bad read would cost the job all steps since the checkpoint before."""
    await a_run_with_three_checkpoints(bad_day, tmp_path)
    bad_day.corrupt_once = set(await bad_day.list())
    run_log = RunLog(bad_day)
    await run_log.refresh()
    restored = await restore_newest(bad_day, run_log, tmp_path / "memory")
    assert restored.skipped == ()
    assert restored.fetched is not None
    assert read_w(restored.fetched) == content(6)


async def test_when_every_checkpoint_is_broken_all_are_named(
    bad_day: UnreliableStore, tmp_path: Path
) -> None:
    run = await a_run_with_three_checkpoints(bad_day, tmp_path)
    bad_day.corrupt = {c.manifest for c in run.log.commits}
    restored = await restore_newest(bad_day, run.log, tmp_path / "memory")
    assert restored.fetched is None
    assert [s.commit.step for s in restored.skipped] == [6, 4, 2]


async def test_a_store_that_does_not_answer_is_no_reason_to_go_back(
    bad_day: UnreliableStore, tmp_path: Path
) -> None:
    run = await a_run_with_three_checkpoints(bad_day, tmp_path)
    bad_day.away = True
    with pytest.raises(Unreachable):
        await restore_newest(bad_day, run.log, tmp_path / "memory")


async def test_a_store_that_is_too_slow_for_several_chunks_at_once_is_read_at_last(
    bad_day: UnreliableStore, tmp_path: Path
) -> None:
    run = ARun(bad_day, tmp_path / "staged")
    await run.claim(1)
    saved = await run.save(2, world=4)
    folder = tmp_path / "memory"
    fetcher = Fetcher(NarrowStore(bad_day), MemoryTier(folder))
    for _ in range(16):
        with contextlib.suppress(Unreachable):
            fetched = await fetcher.fetch(saved, folder)
            break
    else:
        pytest.fail("each try ran out of time")
    assert read_w(fetched) == content(2)


async def test_what_is_there_already_is_not_fetched_again_and_the_rest_is_removed(
    bad_day: UnreliableStore, tmp_path: Path
) -> None:
    run = await a_run_with_three_checkpoints(bad_day, tmp_path)
    memory = tmp_path / "memory"
    await fetch(bad_day, run.log.commits[1], memory)
    old = await MemoryTier(memory).list()
    fetched = await fetch(bad_day, run.log.commits[2], memory)
    new = await MemoryTier(memory).list()
    chunks = set(fetched.needed)
    assert new == {*chunks, run.log.commits[2].digest}
    assert not new & set(old)
    bad_day.calls.clear()
    await fetch(bad_day, run.log.commits[2], memory)
    assert bad_day.calls == []


async def test_a_file_that_was_damaged_in_memory_is_fetched_again(
    bad_day: UnreliableStore, tmp_path: Path
) -> None:
    run = await a_run_with_three_checkpoints(bad_day, tmp_path)
    first = await fetch(bad_day, run.log.commits[2], tmp_path / "memory")
    damage(next(iter(first.places.values())))
    again = await fetch(bad_day, run.log.commits[2], tmp_path / "memory")
    assert read_w(again) == content(6)


async def test_a_resume_leaves_what_lies_beyond_it_off_the_lineage(
    bad_day: UnreliableStore, tmp_path: Path
) -> None:
    run = await a_run_with_three_checkpoints(bad_day, tmp_path)
    await run.claim(2, resume=run.log.commits[1])
    restored = await restore_newest(bad_day, run.log, tmp_path / "memory")
    assert restored.fetched is not None
    assert restored.fetched.commit.step == 4


async def test_the_ledger_is_not_brought_into_memory(
    bad_day: UnreliableStore, tmp_path: Path
) -> None:
    run = await a_run_with_three_checkpoints(bad_day, tmp_path)
    fetched = await fetch(bad_day, run.log.commits[2], tmp_path / "memory")
    there = {p.name for p in (tmp_path / "memory/chunks").iterdir()}
    assert not there & {s.chunk for s in fetched.manifest.ledger}


async def test_no_other_pod_is_told_to_delete_the_step_that_is_fetched(
    bad_day: UnreliableStore, tmp_path: Path
) -> None:
    """A near save beyond it was kept, and the copier of the former epoch still runs."""
    run = await a_run_with_three_checkpoints(bad_day, tmp_path)
    commit, folder = run.log.commits[-1], tmp_path / "memory"
    folder.mkdir()
    memory = MemoryTier(folder)
    memory.committed = memory.kept = commit.step + 100
    told, rewind = list[int](), memory.rewind

    async def look(resumed: Resumed) -> None:
        told.append(memory.since)
        await rewind(resumed)

    memory.rewind = look  # type: ignore[method-assign]
    await Fetcher(bad_day, memory).fetch(commit, folder)
    assert told == [memory.since] == [commit.step]


async def test_fetching_says_what_is_broken(bad_day: UnreliableStore, tmp_path: Path) -> None:
    run = await a_run_with_three_checkpoints(bad_day, tmp_path)
    said = await remove_chunk(run, bad_day)
    with pytest.raises(Broken, match=said):
        await fetch(bad_day, run.log.commits[-1], tmp_path / "memory")

"""`everstep fetch`: a checkpoint's files from a store to a folder."""

import errno
import io
import os
from pathlib import Path

import pytest

from agent.a_run import ARun, content
from agent.retiring import RetiringStore
from agent.unreliable import NarrowStore, UnreliableStore
from everstep_agent.checkpoint.manifests import Broken
from everstep_agent.runlog.run_log import LogDamaged
from everstep_agent.storage import open_store
from everstep_agent.tools.fetch import NothingToFetch, fetch_checkpoint
from everstep_contract import codec, log, manifest
from everstep_contract.fetched import Fetched
from everstep_contract.places import Places, name_span


@pytest.fixture
async def store(tmp_path: Path) -> UnreliableStore:
    """Checkpoints of the steps 4 and 9."""
    made = UnreliableStore(open_store("memory://", "", {}))
    run = ARun(made, tmp_path / "staged")
    await run.claim(1)
    await run.save(4)
    await run.save(9, since=4)
    return made


def read(found: Fetched, name: str) -> bytes:
    """The bytes of a tensor, from the files alone."""
    places = codec.loads(Places, Path(found.places).read_bytes()).chunks
    tensors = manifest.decode(Path(found.manifest).read_bytes()).tensors
    body = b""
    for piece in next(t.pieces for t in tensors if t.name == name):
        place, count = places[piece.chunk], piece.lengths[0] * piece.lengths[1] * 4
        assert name_span(piece.at, count) in place.sums
        body += Path(place.path).read_bytes()[place.start + piece.at :][:count]
    return body


@pytest.mark.parametrize(("step", "wanted"), [(None, 9), (4, 4)])
async def test_the_files_hold_the_checkpoint(
    store: UnreliableStore, tmp_path: Path, step: int | None, wanted: int
) -> None:
    found = await fetch_checkpoint(store, tmp_path, step=step)
    assert (found.step, found.skipped) == (wanted, ())
    assert read(found, "w") == content(wanted)


async def test_a_checkpoint_with_a_damaged_chunk_is_passed_over(
    store: UnreliableStore, tmp_path: Path
) -> None:
    store.corrupt = {k for k in await store.list("chunks") if "/0000000009/" in k}
    found = await fetch_checkpoint(store, tmp_path)
    assert (found.step, [s.step for s in found.skipped]) == (4, [9])
    assert read(found, "w") == content(4)
    with pytest.raises(Broken, match="is corrupt"):
        await fetch_checkpoint(store, tmp_path, step=9)


async def test_an_old_checkpoint_is_not_taken_for_the_newest_if_the_log_lacks_an_entry(
    store: UnreliableStore, tmp_path: Path
) -> None:
    """Nor is a step that follows the missing entry said not to exist."""
    await store.delete(log.key(2))
    await store.create(log.key(3), b"{}")
    with pytest.raises(LogDamaged, match=r"is gone, though place 3 stands.*name its step: 4"):
        await fetch_checkpoint(store, tmp_path)
    assert (await fetch_checkpoint(store, tmp_path, step=4)).step == 4
    with pytest.raises(LogDamaged, match="is gone, though place 3 stands"):
        await fetch_checkpoint(store, tmp_path, step=9)


async def test_over_a_slow_connection_the_chunks_are_brought_one_after_the_other(
    store: UnreliableStore, tmp_path: Path
) -> None:
    found = await fetch_checkpoint(NarrowStore(store), tmp_path)
    assert read(found, "w") == content(9)


async def test_a_folder_without_room_is_named(
    store: UnreliableStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(io.BytesIO):
        def write(self, _: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "open", lambda *_: Full())
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}'"):
        await fetch_checkpoint(store, tmp_path)


async def test_a_file_in_the_place_of_the_folder_is_named(
    store: UnreliableStore, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=f"^--to {tmp_path}/file: {tmp_path}/file is a file, not"):
        await fetch_checkpoint(store, tmp_path / "file")
    with pytest.raises(OSError, match=f"^--to {tmp_path}/file/below: {tmp_path}/file is a file"):
        await fetch_checkpoint(store, tmp_path / "file" / "below")


async def test_what_is_not_there_is_said(store: UnreliableStore, tmp_path: Path) -> None:
    with pytest.raises(NothingToFetch, match="the checkpoint of step 9 has no model"):
        await fetch_checkpoint(store, tmp_path, only=("model",))
    empty = UnreliableStore(open_store("memory://", "", {}))
    with pytest.raises(NothingToFetch, match="there is no run"):
        await fetch_checkpoint(empty, tmp_path)
    await ARun(empty, tmp_path).claim(1)
    with pytest.raises(NothingToFetch, match="the run has no checkpoint yet"):
        await fetch_checkpoint(empty, tmp_path)


async def test_if_the_job_retires_the_checkpoint_meanwhile_the_next_one_is_fetched(
    tmp_path: Path,
) -> None:
    """And not an older one that is pinned, as if the newest were damaged."""
    store = RetiringStore()
    run = ARun(store, tmp_path / "staged")
    await run.claim(1)
    await run.save(4, pins=("first",))
    await run.save(9, since=4)
    store.run = run
    found = await fetch_checkpoint(store, tmp_path)
    assert (found.step, found.skipped) == (10, ())
    assert read(found, "w") == content(10)
    store.run = run
    with pytest.raises(NothingToFetch, match=r"of step 10 was retired while it was read: pin one"):
        await fetch_checkpoint(store, tmp_path, step=10)

"""A folder as object store: what remains after a power cut or a killed writer."""

import asyncio
import contextlib
import errno
import hashlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from everstep_agent import aside
from everstep_agent.storage import folder, obstore_store, open_store, probe
from everstep_agent.storage.address import parse_uri
from everstep_agent.storage.errors import AlreadyExists, NoAtomicCreate, Unreachable
from everstep_agent.storage.opening import open_raw

KEY = f"chunks/token/5/{'a' * 64}"


async def test_content_is_on_disk_before_its_key_and_each_folder_above_it_after(
    tmp_path: Path, synced: list[str]
) -> None:
    store = open_store(f"file://{tmp_path}/store", "ns/run", {})
    run = tmp_path / "store" / "ns" / "run"
    assert {str(tmp_path), str(tmp_path / "store"), str(run.parent)} <= set(synced)
    synced.clear()
    await store.create(KEY, b"x")
    first, *folders = synced
    assert Path(first).parent == run / ".staging"
    above = [run / KEY, *(run / KEY).parents]
    assert folders == [str(p) for p in above[1 : above.index(run) + 1]]


async def test_what_an_earlier_try_has_created_is_on_disk_before_it_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, synced: list[str]
) -> None:
    """The writer finds its own entry, and goes on as if it had just been written."""

    def fail(path: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    store, run = open_raw(f"file://{tmp_path}", "run", {}), tmp_path / "run"
    with monkeypatch.context() as broken:
        broken.setattr(folder, "_sync_folder", fail)
        with pytest.raises(Unreachable):
            await store.create("log/0.json", b"x")
    synced.clear()
    with pytest.raises(AlreadyExists):
        await store.create("log/0.json", b"x")
    assert synced[1:] == [str(run / "log"), str(run)]


def test_the_folder_above_the_store_need_not_be_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a shared disk everybody may have a folder, and nobody may list them (mode 0711)."""
    hidden, opened = str(tmp_path), os.open

    def refuse(path: str | Path, *rest: int) -> int:
        if str(path) == hidden:
            raise PermissionError(errno.EACCES, "Permission denied", hidden)
        return opened(path, *rest)

    (tmp_path / "mine").mkdir()
    monkeypatch.setattr(os, "open", refuse)
    open_store(f"file://{tmp_path}/mine", "ns/run", {})
    assert (tmp_path / "mine" / "ns" / "run").is_dir()


@pytest.mark.parametrize("answer", [errno.ENOSPC, errno.EROFS])
async def test_a_folder_that_takes_no_file_can_be_opened_and_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: int
) -> None:
    """A pod that starts meanwhile waits for the store, as those that train do."""

    def refuse(path: Path, *_: object) -> None:
        raise OSError(answer, os.strerror(answer), str(path))

    await open_store(f"file://{tmp_path}", "run", {}).put(KEY, b"x")
    monkeypatch.setattr(os, "utime", refuse)
    assert await open_store(f"file://{tmp_path}", "run", {}).get(KEY) == b"x"


async def test_a_place_that_is_taken_leaves_no_staging_file(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}", "run", {})
    await store.create(KEY, b"first")
    with pytest.raises(AlreadyExists):
        await store.create(KEY, b"second")
    await store.put(KEY, b"third")
    assert await store.get(KEY) == b"third"
    assert list((tmp_path / "run" / ".staging").iterdir()) == []


@pytest.mark.parametrize("answer", [errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EXDEV])
async def test_a_file_system_without_hard_links_is_refused_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: int
) -> None:
    def link(path: Path, target: Path) -> None:
        raise OSError(answer, os.strerror(answer), str(path), None, str(target))

    monkeypatch.setattr(Path, "hardlink_to", link)
    store = open_store(f"file://{tmp_path}", "run", {})
    with pytest.raises(NoAtomicCreate, match="the file system of this folder has no hard links"):
        await probe(store)
    await store.put(KEY, b"x")
    assert [p.name for p in list_files(tmp_path / "run")] == [Path(KEY).name]


def list_files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


async def test_a_folder_that_hangs_keeps_no_thread_from_other_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NFS does without its server. Saves are still to be copied to other pods."""
    store = obstore_store.open_folder(parse_uri(f"file://{tmp_path}", "run"), create=True)
    await store.put(KEY, b"x")
    answers, measure = threading.Event(), folder.measure

    def hang(*_: object) -> int:
        answers.wait()
        return 0

    monkeypatch.setattr(obstore_store, "STALL_SECONDS", 0.05)
    monkeypatch.setattr(folder, "stream_file", hang)
    try:
        for verb in (lambda: store.stream(KEY, hashlib.sha256), lambda: store.get(KEY)):
            calls = (verb() for _ in range(40))
            refused = await asyncio.gather(*calls, return_exceptions=True)
            assert {type(error) for error in refused} == {Unreachable}
            monkeypatch.setattr(folder, "measure", hang)
        async with asyncio.timeout(10):
            assert await asyncio.to_thread(divmod, 7, 2) == (3, 1)
            assert await aside.run(divmod, 7, 2) == (3, 1)
    finally:
        answers.set()
    monkeypatch.setattr(folder, "measure", measure)
    async with asyncio.timeout(10):
        while True:
            with contextlib.suppress(Unreachable):
                assert await store.get(KEY) == b"x"
                break


WRITER = """
import asyncio, sys
from everstep_agent.storage import folder, open_store
store = open_store(sys.argv[1], "run", {})
print("begins", flush=True)
asyncio.run(store.put(sys.argv[2], b"x" * 2**29))
"""


def kill_a_writer(folder: Path) -> list[Path]:
    """Kill a writer in the middle of a write; return the files that it left in the folder."""
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, f"file://{folder}", KEY], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    writer.stdout.readline()
    while not (found := [p for p in (folder / "run").rglob("*") if p.is_file()]):
        assert writer.poll() is None, "it ended before it could be killed"
    writer.kill()
    writer.wait()
    writer.stdout.close()
    return found


async def test_what_a_killed_writer_left_is_in_no_list_and_collected(tmp_path: Path) -> None:
    (left,) = kill_a_writer(tmp_path)
    assert left.parent == tmp_path / "run" / ".staging"
    store = open_store(f"file://{tmp_path}", "run", {})
    assert await store.list() == []
    assert left.exists(), "its writer might still be alive"
    await store.put(KEY, b"y")
    assert await store.list() == [KEY]
    os.utime(left, times=(left.stat().st_atime, left.stat().st_mtime - 2 * 3600))
    again = open_store(f"file://{tmp_path}", "run", {})
    assert not left.exists()
    assert await again.get(KEY) == b"y"


def test_it_is_collected_where_there_is_no_room_for_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be what has filled the disk."""
    left, opened = tmp_path / "run" / ".staging" / "left", os.open
    left.parent.mkdir(parents=True)
    left.write_bytes(b"x")
    os.utime(left, times=(0, 0))

    def refuse(path: str | Path, flags: int, *rest: int) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return opened(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
    open_store(f"file://{tmp_path}", "run", {})
    assert not left.exists()


async def test_it_is_collected_while_the_others_write_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(f"file://{tmp_path}", "run", {})
    (left,) = kill_a_writer(tmp_path)
    monkeypatch.setattr(folder, "STALE_SECONDS", 0.0)
    await store.put(KEY, b"y")
    assert not left.exists()
    assert await store.get(KEY) == b"y"


async def test_a_reader_collects_nothing(tmp_path: Path) -> None:
    (left,) = kill_a_writer(tmp_path)
    os.utime(left, times=(0, 0))
    open_store(f"file://{tmp_path}", "run", {}, create=False)
    assert left.exists()

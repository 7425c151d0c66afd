"""A disk of the node: after a power failure, after a killed writer, and while it hangs."""

import asyncio
import fcntl
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from agent.a_term import SETTINGS
from agent.gang import Gang
from agent.tier_given import BODY, OWNER, a_chunk, a_save
from everstep_agent.agent import build_disk_tier
from everstep_agent.checkpoint import folder_tier
from everstep_agent.checkpoint.files import PART
from everstep_agent.checkpoint.folder_tier import LOCK, FolderTier
from everstep_agent.pod import copier
from everstep_contract import levels

OTHER = b"another" * 900


def a_disk(folder: Path) -> FolderTier:
    return FolderTier(folder / "volume" / "ns_run", "disk", run="a-run", sync=True)


async def test_a_copy_is_on_disk_with_all_folders_above_it(
    tmp_path: Path, synced: list[str]
) -> None:
    disk = a_disk(tmp_path)
    await disk.keep(OWNER, [a_save(BODY)], 0)
    above = [str(p) for p in (tmp_path, tmp_path / "volume", disk.folder)]
    assert set(above) <= set(synced)
    synced.clear()
    await disk.put(a_chunk(), BODY)
    content, folder = synced
    assert content.startswith(f"{disk.folder}/{a_chunk().digest}.")
    assert folder == str(disk.folder)


@pytest.mark.parametrize(
    "other", [{"uri": "s3://b/other"}, {"run": "ns_job"}], ids=lambda v: next(iter(v))
)
async def test_another_run_on_the_same_disk_keeps_its_copies(
    tmp_path: Path, other: dict[str, str]
) -> None:
    mine = replace(SETTINGS, uri="s3://b/mine", run="ns/job", disk_tier=str(tmp_path))
    disk, beside = build_disk_tier(mine), build_disk_tier(replace(mine, **other))
    assert disk
    assert beside
    await disk.keep(OWNER, [a_save(BODY)], 0)
    await disk.put(a_chunk(), BODY)
    await beside.keep(OWNER, [a_save(OTHER)], 0)
    assert await disk.get(a_chunk()) == BODY
    successor = build_disk_tier(mine)
    assert successor
    assert await successor.get(a_chunk()) == BODY


async def test_a_folder_that_a_killed_pod_made_is_on_disk_before_it_is_used(
    tmp_path: Path, synced: list[str]
) -> None:
    disk = a_disk(tmp_path)
    disk.folder.mkdir(parents=True)
    await disk.keep(OWNER, [a_save(BODY)], 0)
    assert str(disk.folder.parent) in synced


WRITER = """
import sys
from everstep_agent.checkpoint.files import replace_file
from pathlib import Path
print("begins", flush=True)
replace_file(Path(sys.argv[1]), b"x" * 2**29, sync=True)
"""


def kill_a_writer(target: Path) -> Path:
    """Kill a writer in the middle of a write; return the file that it left."""
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(target)], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    writer.stdout.readline()
    while not (found := list(target.parent.glob(f"*{PART}"))):
        assert writer.poll() is None, "it ended before it could be killed"
    writer.kill()
    writer.wait()
    writer.stdout.close()
    return found[0]


async def test_what_a_killed_writer_left_goes_with_the_save_that_it_belonged_to(
    tmp_path: Path,
) -> None:
    disk = a_disk(tmp_path)
    await disk.keep(OWNER, [a_save(BODY, step=3)], 0)
    left = await asyncio.to_thread(kill_a_writer, disk.folder / a_chunk().digest)
    assert set(await disk.list()) == set(), "half a chunk must not be listed"
    await disk.keep(OWNER, [a_save(OTHER, step=6)], 3)
    assert left.exists(), "its writer might still be alive"
    await disk.keep(OWNER, [], 6)
    assert not left.exists()


async def test_the_end_of_a_run_leaves_nothing_on_the_disk(tmp_path: Path) -> None:
    disk = a_disk(tmp_path)
    for owner in (OWNER, "slot-2"):
        await disk.keep(owner, [a_save(BODY)], 0)
    await disk.put(a_chunk(), BODY)
    await disk.drop(OWNER)
    assert await disk.get(a_chunk()) == BODY, "the other pod on this node needs it"
    await disk.drop("slot-2")
    assert list((tmp_path / "volume").iterdir()) == []


async def test_an_agent_that_waits_for_a_folder_that_is_removed_makes_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, opened = a_disk(tmp_path), asyncio.Event()
    await disk.keep("slot-2", [], 0)
    loop, flock = asyncio.get_running_loop(), fcntl.flock

    def tell_and_lock(descriptor: int, how: int) -> None:
        loop.call_soon_threadsafe(opened.set)
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", tell_and_lock)
    with (disk.folder / LOCK).open("wb") as lock:
        flock(lock, fcntl.LOCK_EX)
        keeping = asyncio.create_task(disk.keep(OWNER, [a_save(BODY)], 0))
        await opened.wait()
        for path in disk.folder.iterdir():
            path.unlink()
        disk.folder.rmdir()
    await keeping
    assert list(disk.read_notes()) == [OWNER]


@pytest.fixture
def hung(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FolderTier]:
    """A disk whose lock is held, so that each change waits forever."""
    monkeypatch.setattr(folder_tier, "ANSWER_SECONDS", 0.2)
    disk = a_disk(tmp_path)
    disk.folder.mkdir(parents=True)
    (disk.folder / a_chunk().digest).write_bytes(BODY)
    with (disk.folder / LOCK).open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield disk


async def test_a_disk_that_hangs_is_told_and_passed_over(hung: FolderTier) -> None:
    assert await hung.get(a_chunk()) == BODY
    for _ in range(folder_tier.DISK_THREADS):
        with pytest.raises(TimeoutError, match="did not answer within 0 s"):
            await hung.keep(OWNER, [a_save(BODY)], 0)
    assert await hung.get(a_chunk()) is None
    with pytest.raises(TimeoutError):
        await hung.list()


async def test_a_disk_that_hangs_takes_no_thread_from_the_memory(
    hung: FolderTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = FolderTier(tmp_path / "memory", "memory")
    waiting = [asyncio.create_task(hung.keep(OWNER, [], 0)) for _ in range(40)]
    await asyncio.sleep(0)  # they have begun, each with the short limit
    monkeypatch.setattr(folder_tier, "ANSWER_SECONDS", 60.0)
    await memory.keep(OWNER, [a_save(OTHER)], 0)
    await memory.put(a_chunk(OTHER), OTHER)
    assert await memory.get(a_chunk(OTHER)) == OTHER
    await asyncio.gather(*waiting, return_exceptions=True)


def has_copied(shown: str) -> bool:
    return any("event=copied " in x and " tier=disk " in x for x in shown.splitlines())


async def test_a_job_trains_on_while_its_disk_hangs_and_copies_again_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_tier, "ANSWER_SECONDS", 0.3)
    monkeypatch.setattr(copier, "RETRY_SECONDS", 0.2)
    gang = Gang(tmp_path, 2, save_every_steps=5, disk_tier=f"{tmp_path}/volume", disk_seconds=0.05)
    gang.stub |= {"STUB_UNTIL": "100000", "STUB_STEP_MS": "20"}
    async with gang:
        await gang.until(lambda s: has_copied(gang.shown()))
        (path,) = (tmp_path / "volume").glob(f"*/{LOCK}")
        with path.open("wb") as lock:
            await asyncio.to_thread(fcntl.flock, lock, fcntl.LOCK_EX)
            await gang.until(lambda s: "kind=ETIMEDOUT tier=disk" in gang.shown())
            at = gang.seen.step
            await gang.until(lambda s: s.committed and s.committed.step > at)
        began = len(gang.shown())
        await gang.until(lambda s: has_copied(gang.shown()[began:]))
        gang.want(stop=levels.Stop.SUSPEND)
        await gang.reports()
        assert not gang.seen.restarts
        assert [claim.epoch for claim in (await gang.run_log()).claims] == [1]

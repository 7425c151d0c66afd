"""Copies of saves in the memory of other pods: the loss of any one node and its memory costs nothing."""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.gang import Gang, assert_exact
from everstep_agent.checkpoint.folder_tier import LOCK
from everstep_agent.peers import incoming
from everstep_agent.storage.errors import Denied
from everstep_agent.storage.retrying import Retrying
from everstep_agent.storage.store import S
from everstep_contract import levels


class Reads:
    """Records every key that an agent reads from the store; can refuse reads of checkpoints."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.refuses = False

    @property
    def of_checkpoints(self) -> list[str]:
        return [key for key in self.keys if not key.startswith("log/")]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    found, get, stream = Reads(), Retrying.get, Retrying.stream

    def note(key: str) -> None:
        found.keys.append(key)
        if found.refuses and not key.startswith("log/"):
            raise Denied(f"{key}: refused")

    async def note_get(store: Retrying, key: str) -> bytes:
        note(key)
        return await get(store, key)

    async def note_stream(
        store: Retrying, key: str, begin: Callable[[], S], *, urgent: bool = False
    ) -> tuple[int, S]:
        if urgent:  # else it is read back
            note(key)
        return await stream(store, key, begin, urgent=urgent)

    monkeypatch.setattr(Retrying, "get", note_get)
    monkeypatch.setattr(Retrying, "stream", note_stream)
    return found


def a_gang(tmp_path: Path, **settings: object) -> Gang:
    """Three pods of one rank; each stages a part of the state that no other stages."""
    gang = Gang(tmp_path, 3, save_every_steps=12, **settings)
    gang.stub |= {"STUB_UNTIL": "24", "STUB_STEP_MS": "60"}
    return gang


def is_copied(seen: levels.Seen) -> bool:
    return bool(
        seen.committed and seen.committed.step == 12 and seen.copied_step == 12 and seen.good
    )


async def lose_all(gang: Gang, *lost: int) -> None:
    """Kill all processes, and delete the memory of the nodes in `lost`."""
    await asyncio.gather(*(gang.kill(slot, say=slot in lost) for slot in range(3)))
    for slot in lost:
        shutil.rmtree(gang.tmp / f"m-{gang.uid}-{slot}-0")
    for slot in range(3):
        await gang.start(slot, int(slot in lost))


@pytest.mark.parametrize("lost", [0, 1, 2])
async def test_the_loss_of_any_node_restores_without_the_store(
    tmp_path: Path, reads: Reads, lost: int
) -> None:
    async with a_gang(tmp_path) as gang:
        await gang.until(is_copied)
        reads.keys.clear()
        # If the coordinator's memory is lost, the next one reads the seconds spent so far from the manifest.
        reads.refuses = lost != 0
        await lose_all(gang, lost)
        seen = await gang.until(lambda s: s.epoch == 2 and s.running)
        assert seen.step >= 12
        read, reads.refuses = reads.of_checkpoints, False
        assert [key for key in read if key.startswith("chunks/")] == []
        assert len(read) <= (lost == 0), read
        sources = {slot: set(agent.pod.restored_from) for slot, agent in gang.agents.items()}
        assert sources[lost] == {"peer"}, "its memory was empty"
        assert set().union(*sources.values()) == {"memory", "peer"}
        await gang.reports()
        run_log = await gang.run_log()
        assert [c.epoch for c in run_log.claims] == [1, 2], "the restore needs one claim only"
        await assert_exact(gang, 24)


async def test_without_copies_a_lost_node_is_restored_from_the_store(
    tmp_path: Path, reads: Reads
) -> None:
    async with a_gang(tmp_path, peer_bandwidth=0) as gang:
        await gang.until(lambda s: s.committed and s.committed.step == 12 and s.good)
        reads.keys.clear()
        await lose_all(gang, 1)
        seen = await gang.until(lambda s: s.epoch == 2 and s.running)
        assert seen.copied_step == 0
        assert any(key.startswith("chunks/") for key in reads.keys)
        await gang.reports()
        await assert_exact(gang, 24)


def list_on_disks(folder: Path) -> list[str]:
    return [path.name for path in folder.glob("disk-*/*/*") if path.name != LOCK]


async def test_saves_on_the_nodes_disks_outlive_every_pod(tmp_path: Path, reads: Reads) -> None:
    """Each slot has a disk of its own, so it needs the others' disks for their parts."""
    gang = a_gang(tmp_path, peer_bandwidth=0)
    start = gang.start

    async def start_on_its_node(slot: int, attempt: int) -> object:
        return await start(slot, attempt, disk_tier=str(tmp_path / f"disk-{slot}"))

    gang.start = start_on_its_node  # type: ignore[method-assign,assignment]
    async with gang:
        await gang.until(lambda s: s.committed and s.committed.step == 12 and s.good)
        await gang.until(lambda s: gang.shown().count("event=copied") == 3)
        reads.keys.clear()
        assert list_on_disks(tmp_path)
        await lose_all(gang, 0, 1, 2)
        await gang.until(lambda s: s.epoch == 2 and s.running)
        assert [key for key in reads.of_checkpoints if key.startswith("chunks/")] == []
        sources = [dict(agent.pod.restored_from) for agent in gang.agents.values()]
        assert sources == [{"disk": 1, "peer": 2}] * 3
        await gang.reports()
        await assert_exact(gang, 24)
        assert list_on_disks(tmp_path) == [], "nobody needs them once the run has reached its end"


async def test_where_no_pod_has_room_for_copies_training_goes_on_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incoming, "RESERVE_BYTES", 2**60)
    async with a_gang(tmp_path) as gang:
        await gang.until(lambda s: s.committed and s.committed.step == 12)
        await gang.reports()
        assert gang.seen.copied_step == 0
        assert "No space left" in gang.shown()
        await assert_exact(gang, 24)

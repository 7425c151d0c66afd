"""The pods of a job read each checkpoint back together. Real agents, with a folder as the store."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from agent.gang import Gang, assert_exact
from everstep_agent.peers.agent_report import AgentReport
from everstep_agent.pod.pod import Pod
from everstep_agent.storage.retrying import Retrying
from everstep_agent.storage.store import S
from everstep_contract import levels


class Traffic:
    """Records which slot wrote and read which chunk. Can delay a slot's reads and damage its writes."""

    def __init__(self) -> None:
        self.slot_of: Callable[[Retrying], int] = lambda store: -1
        self.written: dict[str, int] = {}
        self.read: list[tuple[int, str]] = []
        self.held_up: set[int] = set()
        self.damages: set[int] = set()
        """Slots whose writes are damaged."""
        self.reached = asyncio.Event()
        """Set once a read is delayed."""


@pytest.fixture
def traffic(monkeypatch: pytest.MonkeyPatch) -> Traffic:
    found, read, put = Traffic(), Retrying.stream, Retrying.put

    async def watch_read(
        store: Retrying, key: str, begin: Callable[[], S], *, urgent: bool = False
    ) -> tuple[int, S]:
        slot = found.slot_of(store)
        if key.startswith("chunks/") and not urgent:  # a restore is urgent
            if slot in found.held_up:
                found.reached.set()
                await asyncio.Event().wait()
            found.read.append((slot, key))
        return await read(store, key, begin, urgent=urgent)

    async def watch_put(store: Retrying, key: str, body: bytes | memoryview) -> None:
        slot = found.slot_of(store)
        if key.startswith("chunks/"):
            found.written[key] = slot
            if slot in found.damages:
                body = bytes([body[0] ^ 1]) + bytes(body[1:])
        await put(store, key, body)

    monkeypatch.setattr(Retrying, "stream", watch_read)
    monkeypatch.setattr(Retrying, "put", watch_put)
    return found


def a_gang(tmp_path: Path, traffic: Traffic) -> Gang:
    gang = Gang(tmp_path, 3, save_every_steps=12, peer_bandwidth=0)
    gang.stub |= {"STUB_UNTIL": "24", "STUB_STEP_MS": "60"}
    traffic.slot_of = lambda store: next(
        (slot for slot, agent in gang.agents.items() if agent.pod.parts.context.store is store), -1
    )
    return gang


def is_good(seen: levels.Seen) -> bool:
    return seen.good is not None and seen.good.step == 12


async def test_each_chunk_is_read_once_by_a_pod_that_did_not_upload_it(
    tmp_path: Path, traffic: Traffic
) -> None:
    async with a_gang(tmp_path, traffic) as gang:
        await gang.until(is_good)
        read = list(traffic.read)
        assert sorted(key for _, key in read) == sorted(traffic.written)
        assert all(traffic.written[key] != slot for slot, key in read)
        assert {slot for slot, _ in read} == {0, 1, 2}
        await gang.reports()
        await assert_exact(gang, 24)


async def test_the_share_of_a_pod_that_dies_goes_to_others(
    tmp_path: Path, traffic: Traffic
) -> None:
    async with a_gang(tmp_path, traffic) as gang:
        traffic.held_up = {2}
        await gang.until(lambda s: traffic.reached.is_set())
        assert gang.seen.good is None
        await gang.kill(2, say=False)
        await gang.until(is_good)
        assert 2 not in {slot for slot, _ in traffic.read}


async def test_the_successor_of_a_coordinator_that_dies_finishes_its_read_back(
    tmp_path: Path, traffic: Traffic
) -> None:
    async with a_gang(tmp_path, traffic) as gang:
        traffic.held_up = {0}
        await gang.until(lambda s: s.coordinator and traffic.reached.is_set())
        assert gang.seen.coordinator is not None
        assert gang.seen.coordinator.slot == 0
        await gang.kill(0, say=False)
        await gang.until(is_good)


async def test_an_agent_of_a_former_version_is_given_nothing_to_read(
    tmp_path: Path, traffic: Traffic, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = Pod.build_report

    def without_read_back(pod: Pod, now: float) -> AgentReport:
        report = build(pod, now)
        return replace(report, read_back=None) if report.slot == 1 else report

    monkeypatch.setattr(Pod, "build_report", without_read_back)
    async with a_gang(tmp_path, traffic) as gang:
        await gang.until(is_good)
        assert {slot for slot, _ in traffic.read} == {0, 2}


@pytest.mark.parametrize("damaged", [0, 2])
async def test_a_damaged_chunk_is_found_by_another_pod_and_told(
    tmp_path: Path, traffic: Traffic, damaged: int
) -> None:
    async with a_gang(tmp_path, traffic) as gang:
        traffic.damages = {damaged}
        seen = await gang.until(lambda s: any("is broken" in note for note in s.notes))
        (note,) = (n for n in seen.notes if "is broken" in n)
        assert "checkpoint of step 12 is broken: chunks/" in note
        assert "is corrupt" in note
        assert seen.good is None
        assert "event=checkpoint_broken" in gang.shown()
        slots = [slot for slot, key in traffic.read if traffic.written[key] == damaged]
        assert slots
        assert damaged not in slots

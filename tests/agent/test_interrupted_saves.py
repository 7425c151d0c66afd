"""A member or the coordinator dies while a save is staged, uploaded or committed."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent.gang import Gang, assert_exact
from agent.unreliable import UnreliableStore
from everstep_agent import agent
from everstep_agent.storage import opening
from everstep_agent.storage.retrying import Patience, Retrying
from everstep_contract import levels


class Gate(UnreliableStore):
    """Writes to keys that begin with `closed` wait. With `late`, only their answers wait."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.closed = ""
        self.late = False
        self.opened = asyncio.Event()
        self.met = asyncio.Event()

    async def _write(self, verb: str, key: str, body: bytes | memoryview) -> None:
        if not self.closed or not key.startswith(self.closed):
            await super()._write(verb, key, body)
            return
        if self.late:
            await super()._write(verb, key, body)
        self.met.set()
        await self.opened.wait()
        if not self.late:
            await super()._write(verb, key, body)


@pytest.fixture
def gates(monkeypatch: pytest.MonkeyPatch) -> list[Gate]:
    """One gate per agent, in the order in which the agents start."""
    found: list[Gate] = []

    def open_gated(*given: Any) -> Retrying:
        found.append(Gate(opening.open_raw(*given)))
        return Retrying(found[-1], Patience(deadline_s=5.0))

    monkeypatch.setattr(agent, "open_store", open_gated)
    return found


def close(gates: list[Gate], prefix: str, *, late: bool = False) -> None:
    for gate in gates:
        gate.closed, gate.late = prefix, late


def move(gates: list[Gate], prefix: str) -> None:
    """Let the waiting writes continue; new writes to keys that begin with `prefix` wait."""
    for gate in gates:
        waiting, gate.closed = gate.opened, prefix
        gate.opened, gate.met = asyncio.Event(), asyncio.Event()
        waiting.set()


def open_all(gates: list[Gate]) -> None:
    for gate in gates:
        gate.closed = ""
        gate.opened.set()


async def met(gates: list[Gate]) -> None:
    async with asyncio.timeout(60):
        tasks = [asyncio.create_task(g.met.wait()) for g in gates]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()


async def replace_slot(gang: Gang, slot: int) -> None:
    await gang.kill(slot)
    await gang.start(slot, gang.attempts[slot] + 1)


@pytest.mark.parametrize(
    ("stage", "coordinator"),
    [
        ("staged", False),
        ("uploaded", True),
        pytest.param("staged", True, marks=pytest.mark.long),
        pytest.param("uploaded", False, marks=pytest.mark.long),
    ],
)
async def test_a_pod_that_dies_with_a_save_on_its_way_costs_no_step(
    tmp_path: Path, gates: list[Gate], stage: str, coordinator: bool
) -> None:
    gang = Gang(tmp_path, 3, save_every_steps=6)
    gang.stub["STUB_UNTIL"] = "60"
    async with gang:
        await gang.until(lambda s: s.step >= 2)
        close(gates, "chunks/" if stage == "staged" else "manifests/")
        await met(gates)
        holds = gang.seen.coordinator.slot if gang.seen.coordinator else 0
        lost = holds if coordinator else (holds + 1) % 3
        await replace_slot(gang, lost)
        open_all(gates)
        seen = await gang.until(lambda s: s.incidents and not s.incidents[-1].open)
        assert seen.incidents[-1].steps_lost == 0
        assert seen.incidents[-1].step >= 6
        await gang.reports()
        await assert_exact(gang, 60)


async def test_a_save_of_the_whole_outlives_the_share_that_is_uploaded_after_it(
    tmp_path: Path, gates: list[Gate]
) -> None:
    gang = Gang(tmp_path, 3, save_every_steps=1)
    gang.stub["STUB_UNTIL"] = "60"
    async with gang:
        await gang.until(lambda s: s.step >= 2)
        close(gates, "chunks/")
        await met(gates)
        furthest = gang.seen.step
        await gang.until(lambda s: s.step >= furthest + 4)  # older saves are dropped
        assert gang.seen.coordinator is not None
        holds = gang.seen.coordinator.slot
        os.kill(gang.worker(holds), signal.SIGKILL)
        await gang.until(lambda s: "whole=True" in gang.shown())
        move(gates, "manifests/")
        others = [a.pod.saves.uploads for s, a in gang.agents.items() if s != holds]
        await gang.until(lambda s: not any(u is None or u._waiting for u in others))
        await replace_slot(gang, holds)
        open_all(gates)
        await gang.until(lambda s: s.epoch == 2 and s.running)
        assert sum(i.steps_lost for i in gang.seen.incidents) == 0
        await gang.reports()
        await assert_exact(gang, 60)


async def test_the_full_state_that_a_rank_staged_before_it_died_too_is_waited_for(
    tmp_path: Path, gates: list[Gate]
) -> None:
    gang = Gang(tmp_path, 2)
    gang.stub["STUB_UNTIL"] = "60"
    async with gang:
        await gang.until(lambda s: s.step >= 5)
        close(gates, "chunks/")
        os.kill(gang.worker(1), signal.SIGKILL)
        await met(gates)
        os.kill(gang.worker(0), signal.SIGKILL)
        decided = ("event=save_awaited", "event=resume_point")
        await gang.until(lambda _: any(event in gang.shown() for event in decided))
        open_all(gates)
        await gang.until(lambda s: s.epoch == 2 and s.running)
        assert sum(i.steps_lost for i in gang.seen.incidents) == 0
        assert gang.seen.committed is not None
        assert gang.seen.committed.step >= 5
        await gang.reports()
        await assert_exact(gang, 60)


async def test_a_coordinator_that_dies_between_a_commit_and_its_answer_has_committed_once(
    tmp_path: Path, gates: list[Gate]
) -> None:
    gang = Gang(tmp_path, 3, save_every_steps=6)
    gang.stub["STUB_UNTIL"] = "60"
    async with gang:
        await gang.until(lambda s: s.step >= 2)
        close(gates, "log/", late=True)
        await met(gates)
        assert gang.seen.coordinator is not None
        await replace_slot(gang, gang.seen.coordinator.slot)
        open_all(gates)
        seen = await gang.until(lambda s: s.incidents and not s.incidents[-1].open)
        assert seen.incidents[-1].steps_lost == 0
        await gang.reports()
        steps = [c.step for c in (await gang.run_log()).commits]
        assert steps[0] == 6
        assert steps == sorted(set(steps))
        await assert_exact(gang, 60)


async def test_who_is_told_to_leave_stays_until_the_upload_that_fails_comes_through(
    tmp_path: Path, gates: list[Gate]
) -> None:
    async with Gang(tmp_path, 2) as gang:
        await gang.until(lambda s: s.step >= 3)
        assert gang.seen.coordinator is not None
        leaver = 1 - gang.seen.coordinator.slot
        for gate in gates:
            gate.away = True
        gang.want(leave=(leaver,), incident="inc-1")
        await gang.until(lambda s: s.storage_error is not None)
        assert gang.seen.left == ()
        assert gang.agents[leaver].pod.workers.current[0].alive
        for gate in gates:
            gate.away = False
        seen = await gang.until(lambda s: s.left)
        assert seen.committed is not None
        assert seen.left[0].step == seen.committed.step >= 3
        await gang.kill(leaver, say=False)
        gang.want(leave=(), gone=(levels.SlotAttempt(slot=leaver, attempt=0),))
        await gang.start(leaver, 1)
        await gang.reports()
        assert [i.steps_lost for i in gang.seen.incidents] == [0]
        await assert_exact(gang, 20)


@pytest.mark.long
async def test_a_part_that_cannot_be_had_is_said_and_the_next_save_is_taken(
    tmp_path: Path,
) -> None:
    """One rank's part is missing once, as if its pod's memory were full."""
    gang = Gang(tmp_path, 2, save_every_seconds=1)
    gang.stub |= {"STUB_UNTIL": "200", "STUB_MODE": f"noroom:{tmp_path}/flag"}
    async with gang:
        seen = await gang.until(lambda s: s.committed and s.committed.step > 0)
        assert (tmp_path / "flag").exists()
        assert any("no room, as told" in note for note in seen.notes)
        assert seen.incidents == ()
        await gang.reports()
        await assert_exact(gang, 200)


async def test_the_coordinator_and_a_rank_of_another_slot_are_lost_at_once(tmp_path: Path) -> None:
    async with Gang(tmp_path, 3) as gang:
        await gang.until(lambda s: s.step >= 3)
        assert gang.seen.coordinator is not None
        lost = gang.seen.coordinator.slot
        other = (lost + 1) % 3
        os.kill(gang.worker(other), signal.SIGKILL)
        await replace_slot(gang, lost)
        await gang.until(lambda s: s.epoch == 2 and s.running)
        assert sum(i.steps_lost for i in gang.seen.incidents) == 0
        await gang.reports()
        assert (await gang.run_log()).claims[1].chain[-1].last_step >= 3
        await assert_exact(gang, 20)


def jumping(step: float) -> Callable[[], float]:
    """Return a wall clock that jumps by `step` seconds at each call, and restarts when out of range."""
    now = [1_000_000_000.0]

    def look() -> float:
        now[0] += step
        now[0] = 1_000_000_000.0 if now[0] > 4e9 or now[0] < 0 else now[0]
        return now[0]

    return look


@pytest.mark.parametrize("leap", [-86_400.0, pytest.param(86_400.0, marks=pytest.mark.long)])
async def test_the_wall_clock_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leap: float
) -> None:
    monkeypatch.setattr("time.time", jumping(leap))
    async with Gang(tmp_path, 2) as gang:
        await gang.until(lambda s: s.step >= 3)
        os.kill(gang.worker(1), signal.SIGKILL)
        await gang.reports()
        assert [i.steps_lost for i in gang.seen.incidents] == [0]
        assert all(p.ms < 60_000 for i in gang.seen.incidents for p in i.phases)
        await assert_exact(gang, 20)

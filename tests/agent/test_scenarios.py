"""Sequences of faults in a job of real agents and stub workers (`gang.py`)."""

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from agent.gang import Gang, assert_exact
from agent.unreliable import UnreliableStore
from everstep_agent import agent, role
from everstep_agent.coordinator import fence
from everstep_agent.storage import opening
from everstep_agent.storage.retrying import Patience, Retrying
from everstep_contract import levels, report

GRACE = 60.0


async def test_a_job_trains_to_its_end_saves_on_the_way_and_every_agent_ends_for_good(
    tmp_path: Path,
) -> None:
    async with Gang(tmp_path, 3, save_every_steps=5) as gang:
        ends = await gang.reports()
        assert {r.cause for r in ends.values()} == {report.Cause.DONE}
        assert all(r.done and r.exit_code() == 0 and r.step == 20 for r in ends.values())
        run_log = await gang.run_log()
        assert [c.epoch for c in run_log.claims] == [1]
        assert run_log.commits[-1].step == 20
        assert run_log.done is not None
        await assert_exact(gang, 20)


async def test_a_slot_that_is_told_to_leave_leaves_after_a_commit_and_is_replaced(
    tmp_path: Path,
) -> None:
    async with Gang(tmp_path, 3) as gang:
        await gang.until(lambda s: s.step >= 3)
        gang.want(leave=(1,), leave_reason="XID 64", incident="inc-1")
        seen = await gang.until(lambda s: s.left)
        left = seen.left[0]
        assert (left.slot, left.attempt) == (1, 0)
        assert seen.committed is not None
        assert (left.epoch, left.step) == (seen.committed.epoch, seen.committed.step)
        await gang.kill(1, say=False)
        gang.want(leave=(), gone=(levels.SlotAttempt(slot=1, attempt=0),))
        await gang.start(1, 1)
        seen = await gang.until(lambda s: s.incidents and not s.incidents[-1].open)
        assert (seen.incidents[-1].id, seen.incidents[-1].cause) == ("inc-1", "Leave")
        assert seen.incidents[-1].rung == "move"
        assert seen.incidents[-1].steps_lost == 0
        assert seen.left == ()
        await gang.reports()
        await assert_exact(gang, 20)


async def test_who_leaves_before_a_recoverys_first_step_has_an_incident_of_its_own(
    tmp_path: Path,
) -> None:
    gang = Gang(tmp_path, 3)
    gang.stub |= {"STUB_UNTIL": "8", "STUB_STEP_MS": "400"}
    async with gang:
        await gang.until(lambda s: s.step >= 1)
        os.kill(gang.worker(1), signal.SIGKILL)
        await gang.until(lambda s: s.epoch == 2 and s.running)
        assert gang.seen.incidents[-1].open, "the first step of epoch 2 is still to come"
        gang.want(leave=(2,), incident="inc-1")
        await gang.until(lambda s: s.left)
        await gang.kill(2, say=False)
        gang.want(leave=(), gone=(levels.SlotAttempt(slot=2, attempt=0),))
        await gang.start(2, 1)
        seen = await gang.until(lambda s: s.epoch == 3 and not s.incidents[-1].open)
        assert [(i.cause, i.rung) for i in seen.incidents] == [
            ("WorkerDied", "restart"), ("Leave", "move"),
        ]  # fmt: skip
        assert seen.incidents[-1].id == "inc-1"
        assert seen.incidents[-1].slots == (2,)
        await gang.reports()
        await assert_exact(gang, 8)


async def test_the_coordinators_own_slot_can_leave(tmp_path: Path) -> None:
    async with Gang(tmp_path, 3) as gang:
        await gang.until(lambda s: s.step >= 3)
        assert gang.seen.coordinator is not None
        slot = gang.seen.coordinator.slot
        gang.want(leave=(slot,), incident="inc-2")
        await gang.until(lambda s: s.left and s.coordinator.slot != slot)
        await gang.kill(slot, say=False)
        gang.want(leave=(), gone=(levels.SlotAttempt(slot=slot, attempt=0),))
        await gang.start(slot, 1)
        await gang.reports()
        await assert_exact(gang, 20)


async def test_a_coordinator_that_leaves_has_its_heir_begin_the_next_epoch(tmp_path: Path) -> None:
    """If it began that epoch itself, it would end the epoch again when it leaves."""
    async with Gang(tmp_path, 3) as gang:
        await gang.until(lambda s: s.step >= 3)
        assert gang.seen.coordinator is not None
        slot = gang.seen.coordinator.slot
        gang.want(leave=(slot,), want_workers=2)
        await gang.until(lambda s: s.left and s.coordinator.slot != slot and s.epoch > 1)
        await gang.kill(slot, say=False)
        gang.want(leave=(), gone=(levels.SlotAttempt(slot=slot, attempt=0),))
        ends = await gang.reports()
        assert {r.cause for r in ends.values()} == {report.Cause.DONE}
        claims = (await gang.run_log()).claims
        assert [c.cause for c in claims] == ["Start", "Shrink"]
        await assert_exact(gang, 20)


async def test_sigterm_of_one_pod_saves_and_leaves_within_the_grace_period(tmp_path: Path) -> None:
    async with Gang(tmp_path, 2, grace_seconds=GRACE) as gang:
        await gang.until(lambda s: s.step >= 3)
        slot = 1 - gang.seen.coordinator.slot
        gang.agents[slot].leave()
        async with asyncio.timeout(GRACE):
            found = await gang.tasks[slot]
        assert found.cause is report.Cause.LEFT
        assert found.step >= 3
        assert "committed" in found.message
        await gang.kill(slot)
        await gang.start(slot, 1)
        await gang.reports()
        await assert_exact(gang, 20)


async def test_sigterm_of_all_pods_at_once_saves_once_and_all_leave(tmp_path: Path) -> None:
    async with Gang(tmp_path, 3, grace_seconds=GRACE) as gang:
        await gang.until(lambda s: s.step >= 3)
        for agent in gang.agents.values():
            agent.leave()
        ends = await gang.reports(GRACE)
        assert {r.cause for r in ends.values()} == {report.Cause.LEFT}
        run_log = await gang.run_log()
        assert len(run_log.commits) == 1


async def test_a_stop_saves_and_ends_every_agent_for_good(tmp_path: Path) -> None:
    async with Gang(tmp_path, 2) as gang:
        await gang.until(lambda s: s.step >= 3)
        gang.want(stop=levels.Stop.SUSPEND)
        ends = await gang.reports()
        assert {r.cause for r in ends.values()} == {report.Cause.STOPPED}
        assert gang.seen.stopped is not None
        run_log = await gang.run_log()
        assert gang.seen.stopped.step == run_log.commits[-1].step >= 3
    async with Gang(tmp_path, 3, uid="uid-2") as again:
        await again.reports()
        await assert_exact(again, 20)


@pytest.mark.parametrize("stop", [False, True])
async def test_when_all_have_heard_of_the_end_nobody_lingers(tmp_path: Path, stop: bool) -> None:
    async with Gang(tmp_path, 3) as gang:
        gang.asks_after_end = False
        if stop:
            await gang.until(lambda s: s.step >= 3)
            gang.want(stop=levels.Stop.SUSPEND)
        await gang.until(lambda s: s.done or s.stopped)
        began = time.monotonic()
        gang.want(hazard_per_hour={0: 1.0})  # too late to matter
        await gang.reports()
        assert time.monotonic() - began < role.LINGER_SECONDS - 1.0


async def test_saves_by_the_clock_happen_at_a_boundary_that_all_agree_on(tmp_path: Path) -> None:
    gang = Gang(tmp_path, 2, save_every_seconds=1)
    gang.stub["STUB_UNTIL"] = "120"
    async with gang:
        await gang.until(
            lambda s: s.committed and s.committed.step > 0 and s.step > s.committed.step
        )
        await gang.reports()
        await assert_exact(gang, 120)


async def test_a_store_that_is_away_for_longer_than_any_patience_costs_neither_job_nor_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores: list[UnreliableStore] = []

    def open_impatient(*given: Any) -> Retrying:
        stores.append(UnreliableStore(opening.open_raw(*given)))
        return Retrying(stores[-1], Patience(deadline_s=0.2))

    monkeypatch.setattr(agent, "open_store", open_impatient)
    monkeypatch.setattr(fence, "FENCE_SECONDS", 0.1)
    async with Gang(tmp_path, 2, save_every_steps=5) as gang:
        await gang.until(lambda s: s.step >= 3)
        for store in stores:
            store.away = True
        await gang.until(lambda s: s.storage_error is not None)
        os.kill(gang.worker(1), signal.SIGKILL)
        await gang.until(lambda s: s.incidents)
        await asyncio.sleep(1.0)  # several times the time limit of a call
        for store in stores:
            store.away = False
        ends = await gang.reports()
        assert {r.cause for r in ends.values()} == {report.Cause.DONE}
        assert gang.seen.incidents[-1].steps_lost == 0
        await assert_exact(gang, 20)


async def test_a_broken_checkpoint_is_passed_over_for_the_one_before_it(tmp_path: Path) -> None:
    gang = Gang(tmp_path, 2, save_every_steps=5)
    async with gang:
        await gang.until(lambda s: s.committed and s.committed.step >= 10)
        gang.want(stop=levels.Stop.SUSPEND)
        await gang.reports()
        newest = (await gang.run_log()).commits[-1]
        store = gang.store()
        raw = await store.get(newest.manifest)
        for key in await store.list("chunks"):
            if f"/{newest.step:010d}/" in key:
                await store.put(key, b"rotten")
        assert raw
    async with Gang(tmp_path, 2, uid="uid-2") as again:
        await again.reports()
        claims = (await again.run_log()).claims
        assert claims[-1].cause == "CheckpointBroken"
        assert claims[-1].chain[-1].last_step < newest.step
        await assert_exact(again, 20)

"""What a job lives through, played by real agents and stub workers (`gang.py`)."""

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from agent.gang import Gang, assert_exact
from agent.unreliable import UnreliableStore
from everstep_agent import agent, role, training
from everstep_agent.storage import opening
from everstep_agent.storage.retrying import Patience, Retrying
from everstep_contract import levels, log, report


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


async def test_a_killed_worker_costs_no_step(tmp_path: Path) -> None:
    async with Gang(tmp_path, 3) as gang:
        await gang.until(lambda s: s.step >= 5)
        os.kill(gang.worker(1), signal.SIGKILL)
        seen = await gang.until(lambda s: s.incidents and not s.incidents[-1].open)
        incident = seen.incidents[-1]
        assert incident.cause == "WorkerDied"
        assert incident.rank == 1
        assert incident.steps_lost == 0
        assert incident.step >= 5
        assert [p.name for p in incident.phases] == [
            "detect", "save", "commit", "regroup", "restart", "first_step",
        ]  # fmt: skip
        await gang.reports()
        run_log = await gang.run_log()
        assert [c.cause for c in run_log.claims] == ["Start", "WorkerDied"]
        assert run_log.claims[1].incident == incident.id
        await assert_exact(gang, 20)


async def test_two_workers_killed_at_once_are_outlived_by_the_third(tmp_path: Path) -> None:
    async with Gang(tmp_path, 3) as gang:
        await gang.until(lambda s: s.step >= 3)
        os.kill(gang.worker(0), signal.SIGKILL)
        os.kill(gang.worker(2), signal.SIGKILL)
        await gang.reports()
        incident = gang.seen.incidents[-1]
        assert incident.steps_lost == 0
        assert set(incident.slots) == {0, 2}
        assert "rank 0 (slot 0)" in incident.message
        assert "rank 2 (slot 2)" in incident.message
        await assert_exact(gang, 20)


@pytest.mark.parametrize("how", ["dies", "stops", "short"])
async def test_when_a_save_fails_another_sound_rank_saves_and_nothing_is_lost(
    tmp_path: Path, how: str
) -> None:
    gang = Gang(tmp_path, 3, hang_seconds=2.0)
    gang.stub["STUB_MODE"] = f"save:{how}:{tmp_path}/flag"
    async with gang:
        await gang.until(lambda s: s.step >= 3)
        os.kill(gang.worker(2), signal.SIGKILL)
        seen = await gang.until(lambda s: s.incidents and not s.incidents[-1].open)
        assert (tmp_path / "flag").exists()
        assert seen.incidents[-1].steps_lost == 0
        assert seen.incidents[-1].step >= 3
        await gang.reports()
        await assert_exact(gang, 20)


async def test_when_no_worker_lives_the_run_goes_on_from_the_newest_commit(tmp_path: Path) -> None:
    async with Gang(tmp_path, 2, save_every_steps=4) as gang:
        await gang.until(lambda s: s.committed and s.committed.step >= 4 and s.step >= 5)
        for slot in (0, 1):
            os.kill(gang.worker(slot), signal.SIGKILL)
        seen = await gang.until(lambda s: s.incidents and not s.incidents[-1].open)
        assert seen.incidents[-1].step % 4 == 0
        await gang.reports()
        await assert_exact(gang, 20)


async def test_a_lost_agent_is_replaced_by_the_slots_next_attempt(tmp_path: Path) -> None:
    async with Gang(tmp_path, 3) as gang:
        await gang.until(lambda s: s.step >= 3)
        await gang.kill(2)
        await gang.start(2, 1)
        await gang.until(lambda s: s.epoch == 2 and s.running)
        assert gang.seen.incidents[-1].steps_lost == 0
        await gang.reports()
        assert gang.seen.restarts == {"AgentLost": 1}
        await assert_exact(gang, 20)


async def test_when_the_coordinator_is_lost_the_lowest_living_slot_takes_over(
    tmp_path: Path,
) -> None:
    async with Gang(tmp_path, 3) as gang:
        await gang.until(lambda s: s.step >= 3)
        assert gang.seen.coordinator is not None
        slot = gang.seen.coordinator.slot
        await gang.kill(slot)
        await gang.start(slot, 1)
        await gang.until(lambda s: s.epoch == 2 and s.running)
        assert gang.seen.coordinator is not None
        assert gang.seen.coordinator.slot == min({0, 1, 2} - {slot})
        await gang.reports()
        run_log = await gang.run_log()
        assert len(run_log.claims) == 2
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


async def test_sigterm_of_one_pod_saves_and_leaves_within_the_grace_period(tmp_path: Path) -> None:
    async with Gang(tmp_path, 2) as gang:
        await gang.until(lambda s: s.step >= 3)
        slot = 1 - gang.seen.coordinator.slot
        gang.agents[slot].leave()
        async with asyncio.timeout(8):
            found = await gang.tasks[slot]
        assert found.cause is report.Cause.LEFT
        assert found.step >= 3
        assert "committed" in found.message
        await gang.kill(slot)
        await gang.start(slot, 1)
        await gang.reports()
        await assert_exact(gang, 20)


async def test_sigterm_of_all_pods_at_once_saves_once_and_all_leave(tmp_path: Path) -> None:
    async with Gang(tmp_path, 3) as gang:
        await gang.until(lambda s: s.step >= 3)
        for agent in gang.agents.values():
            agent.leave()
        ends = await gang.reports(9)
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
        gang.want(hazard_per_hour={0: 1.0})  # news that nobody needs any more
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


async def test_a_hung_rank_is_named_killed_and_recovered(tmp_path: Path) -> None:
    gang = Gang(tmp_path, 2, hang_seconds=1.0)
    gang.stub["STUB_MODE"] = f"hang:6:{tmp_path}/flag"
    async with gang:
        seen = await gang.until(lambda s: s.incidents and not s.incidents[-1].open)
        assert seen.incidents[-1].cause == "WorkerHung"
        assert seen.incidents[-1].rank == 1
        assert "step 6" in seen.incidents[-1].message
        assert seen.incidents[-1].step == 5
        assert seen.incidents[-1].phases[0].name == "detect"
        assert seen.incidents[-1].phases[0].ms >= 1000, "the hang itself is part of it"
        await gang.reports()
        await assert_exact(gang, 20)


async def test_a_node_that_falls_silent_is_named_while_its_end_is_not_proven(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a node that loses power: nobody can tell, until the operator gives it up."""
    for module in ("breaks", "recovering"):
        monkeypatch.setattr(f"everstep_agent.{module}.SILENT_SECONDS", 1.0)
    async with Gang(tmp_path, 3) as gang:
        await gang.until(lambda s: s.step >= 3)
        lost = next(s for s in range(3) if s != gang.seen.coordinator.slot)
        await gang.kill(lost, say=False)
        seen = await gang.until(lambda s: s.incidents and s.incidents[-1].slot == lost)
        waiting = seen.incidents[-1]
        assert waiting.open
        assert waiting.concerns(lost)
        gang.want(gone=(levels.SlotAttempt(slot=lost, attempt=0),), incident=waiting.id)
        await gang.start(lost, 1)
        seen = await gang.until(lambda s: s.epoch == 2 and s.running)
        assert [(i.id, i.cause) for i in seen.incidents] == [(waiting.id, "AgentLost")]
        assert seen.incidents[-1].steps_lost == 0
        await gang.reports()
        await assert_exact(gang, 20)


async def test_the_same_error_at_the_same_step_three_times_fails_the_job(tmp_path: Path) -> None:
    gang = Gang(tmp_path, 2)
    gang.stub["STUB_MODE"] = "fail:6"
    async with gang:
        ends = await gang.reports()
        assert {r.cause for r in ends.values()} == {report.Cause.USER_ERROR}
        found = ends[0]
        assert "step 6 failed 3 times" in found.message
        assert "likely code or data" in found.message
        assert found.traceback == "T"
        run_log = await gang.run_log()
        assert [(c.cause, c.failed) for c in run_log.claims] == [
            ("Start", 0),
            ("UserError", 6),
            ("UserError", 6),
        ]


async def test_a_loss_that_is_not_finite_ends_the_job_at_once(tmp_path: Path) -> None:
    gang = Gang(tmp_path, 2)
    gang.stub["STUB_MODE"] = "nan:6"
    async with gang:
        ends = await gang.reports()
        assert {r.cause for r in ends.values()} == {report.Cause.NOT_FINITE}
        assert gang.seen.failure is not None
        assert len((await gang.run_log()).claims) == 1


async def test_a_script_that_raises_at_once_ends_the_job_with_its_last_words(
    tmp_path: Path,
) -> None:
    gang = Gang(tmp_path, 2)
    gang.stub["STUB_MODE"] = "raise"
    async with gang:
        ends = await gang.reports()
        assert {r.cause for r in ends.values()} == {report.Cause.SCRIPT_ERROR}
        assert "no such data set" in ends[0].message
        assert "Traceback" in ends[0].traceback


async def test_a_script_that_never_trains_is_told_what_to_write(tmp_path: Path) -> None:
    gang = Gang(tmp_path, 2)
    gang.stub["STUB_MODE"] = "silent"
    async with gang:
        ends = await gang.reports()
        assert {r.cause for r in ends.values()} == {report.Cause.SCRIPT_ERROR}
        assert "everstep.run(main)" in ends[0].message


async def test_a_new_job_of_the_same_name_takes_the_run_and_the_former_is_fenced(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr("everstep_agent.training.FENCE_SECONDS", 0.3)
    old = Gang(tmp_path, 2)
    old.stub["STUB_UNTIL"] = "100000"
    async with old:
        await old.until(lambda s: s.step >= 3)
        async with Gang(tmp_path, 2, uid="uid-2") as new:
            ends = await old.reports()
            assert {r.cause for r in ends.values()} == {report.Cause.FENCED}
            assert "uid-2" in ends[0].message
            await new.reports()


async def test_refuse_keeps_a_new_job_from_an_existing_run(tmp_path: Path) -> None:
    async with Gang(tmp_path, 2) as gang:
        await gang.reports()
    async with Gang(tmp_path, 2, uid="uid-2", if_run_exists="Refuse") as again:
        ends = await again.reports()
        assert {r.cause for r in ends.values()} == {report.Cause.RUN_EXISTS}
        assert "checkpoint.run" in ends[0].message


async def test_a_store_that_cannot_be_used_ends_the_job_at_once(tmp_path: Path) -> None:
    async with Gang(tmp_path, 2, uri=f"file://{tmp_path}/no/such/place") as gang:
        found = await gang.tasks[0]
        assert found.cause in (report.Cause.STORE, report.Cause.CONFIG)
        assert "no/such" in found.message


async def test_a_store_that_is_away_for_longer_than_any_patience_costs_neither_job_nor_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores: list[UnreliableStore] = []

    def open_impatient(*given: Any) -> Retrying:
        stores.append(UnreliableStore(opening.open_raw(*given)))
        return Retrying(stores[-1], Patience(deadline_s=0.2))

    monkeypatch.setattr(agent, "open_store", open_impatient)
    monkeypatch.setattr(training, "FENCE_SECONDS", 0.1)
    async with Gang(tmp_path, 2, save_every_steps=5) as gang:
        await gang.until(lambda s: s.step >= 3)
        for store in stores:
            store.away = True
        await gang.until(lambda s: s.storage_error is not None)
        os.kill(gang.worker(1), signal.SIGKILL)
        await gang.until(lambda s: s.incidents)
        await asyncio.sleep(1.0)  # several times the patience of a call
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


async def test_two_workers_in_a_pod_are_ranks_in_slot_order(tmp_path: Path) -> None:
    async with Gang(tmp_path, 2, workers=2) as gang:
        await gang.until(lambda s: s.step >= 3)
        assert [(m.slot, m.rank) for m in gang.seen.members] == [(0, 0), (0, 1), (1, 2), (1, 3)]
        os.kill(gang.worker(1, 1), signal.SIGKILL)
        await gang.reports()
        assert gang.seen.incidents[-1].rank == 3
        assert isinstance((await gang.run_log()).entries[0], log.Claim)
        await assert_exact(gang, 20)


async def test_a_worker_that_is_killed_before_it_begins_ends_its_own_container_only(
    tmp_path: Path,
) -> None:
    async with Gang(tmp_path, 2) as gang:
        await gang.until(lambda s: s.step >= 2)
        await gang.kill(1)
        gang.stub["STUB_MODE"] = "crash"
        await gang.start(1, 1)
        found = await asyncio.wait_for(gang.tasks[1], 30)
        assert found.cause is report.Cause.WORKER_DIED
        assert found.exit_code() == report.EXIT_TRY_AGAIN
        assert "3 times" in found.message
        assert not gang.tasks[0].done()
        gang.stub["STUB_MODE"] = ""
        await gang.start(1, 1)
        ends = await gang.reports()
        assert {r.cause for r in ends.values()} == {report.Cause.DONE}
        assert ends[1].incarnation == 2
        await assert_exact(gang, 20)


async def test_a_pod_whose_slot_has_a_newer_attempt_is_fenced(tmp_path: Path) -> None:
    async with Gang(tmp_path, 2) as gang:
        await gang.until(lambda s: s.step >= 2)
        old = gang.agents[1]
        zombie = gang.tasks.pop(1)
        gang.want(gone=(levels.SlotAttempt(slot=1, attempt=0),))
        await gang.start(1, 1)
        gang.agents[2], gang.tasks[2] = old, zombie  # still told what is wanted
        found = await asyncio.wait_for(zombie, 30)
        assert found.cause is report.Cause.FENCED
        assert "attempt 1 of slot 1" in found.message
        ends = await gang.reports()
        assert ends[0].cause is report.Cause.DONE
        await assert_exact(gang, 20)

"""Lost members: killed, hung, silent or replaced. No state that a surviving rank holds is lost with
them.
"""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from agent.gang import Gang, assert_exact, die_between_two_steps
from everstep_agent.pod.pod_saves import PodSaves
from everstep_contract import levels, log, report


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


async def test_a_worker_that_is_killed_while_it_stages_a_save_leaves_no_memory_taken(
    tmp_path: Path,
) -> None:
    """Else each such death would take the room of a save until the container is restarted."""
    gang = Gang(tmp_path, 2)
    gang.stub["STUB_UNTIL"] = "100000"
    async with gang:
        await gang.until(lambda s: s.step >= 3)
        staging, pid = tmp_path / f"m-{gang.uid}-1-0/staging", gang.worker(1)
        own, of_another = (staging / f"1-3-1-{n}-0123abcd.part" for n in (pid, pid + 1))
        for path in (own, of_another):
            path.write_bytes(b"half a save")
        os.kill(pid, signal.SIGKILL)
        await gang.until(lambda s: not own.exists())
        assert of_another.exists()


async def test_a_worker_that_dies_while_the_former_epochs_uploads_end_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its agent would begin the epoch without it, and the others would wait until the limit of a start."""
    end = PodSaves.end

    async def end_late(saves: PodSaves) -> None:
        (pod,) = [a.pod for a in gang.agents.values() if a.pod.saves is saves]
        if pod.me.slot == 1 and pod.epoch.number == 1:
            monkeypatch.setattr(PodSaves, "end", end)
            os.kill(pod.workers.fresh[0].pid, signal.SIGKILL)
            await gang.until(lambda _: not pod.workers.ready_lives())
        await end(saves)

    async with Gang(tmp_path, 2) as gang:
        await gang.until(lambda s: s.step >= 5)
        monkeypatch.setattr(PodSaves, "end", end_late)
        os.kill(gang.worker(0), signal.SIGKILL)
        await gang.until(lambda s: s.running and s.epoch > 1, seconds=60)
        await gang.reports()
        await assert_exact(gang, 20)


async def test_a_restart_reads_no_chunk_from_the_store(tmp_path: Path) -> None:
    """One pod has staged the whole state. The others read it from that pod, or hold a copy."""
    async with Gang(tmp_path, 3) as gang:
        await gang.until(lambda s: s.step >= 5)
        await die_between_two_steps(gang, 1)
        await gang.until(lambda s: s.incidents and not s.incidents[-1].open)
        sources = [dict(agent.pod.restored_from) for agent in gang.agents.values()]
        assert {tier for found in sources for tier in found} <= {"memory", "peer"}
        assert all(sources)
        await gang.reports()
        await assert_exact(gang, 20)


async def test_agents_that_all_come_back_adopt_what_they_held(tmp_path: Path) -> None:
    gang = Gang(tmp_path, 2, save_every_steps=12)
    gang.stub["STUB_STEP_MS"] = "60"  # no other save follows before the agents are killed
    async with gang:
        await gang.until(lambda s: s.committed and s.committed.step == 12)
        for slot in (0, 1):
            await gang.kill(slot, say=False)
        for slot in (0, 1):
            await gang.start(slot, 0)
        await gang.until(lambda s: s.epoch == 2 and s.running)
        for agent in gang.agents.values():
            assert set(agent.pod.restored_from) == {"memory"}
        await gang.reports()
        await assert_exact(gang, 20)


async def test_a_held_copy_that_was_damaged_is_replaced(tmp_path: Path) -> None:
    gang = Gang(tmp_path, 2, save_every_steps=12)
    gang.stub["STUB_STEP_MS"] = "60"  # no other save follows before the agents are killed
    async with gang:
        await gang.until(lambda s: s.committed and s.committed.step == 12)
        for slot in (0, 1):
            await gang.kill(slot, say=False)
        assert len(damage_held(tmp_path)) == 2
        for slot in (0, 1):
            await gang.start(slot, 0)
        await gang.reports()
        assert gang.shown().count("chunk_mended") == 2, "each pod repairs its own copy only"
        await assert_exact(gang, 20)


def damage_held(folder: Path) -> list[Path]:
    """Change all bytes of the staged files that agents hold; return the files."""
    files = [note.with_name(note.name.removesuffix(".held")) for note in folder.rglob("*.held")]
    for file in files:
        file.write_bytes(bytes(b ^ 1 for b in file.read_bytes()))
    return files


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
        await die_between_two_steps(gang, 2)
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
        assert seen.incidents[-1].phases[0].ms >= 1000, "the detection includes the hang itself"
        await gang.reports()
        await assert_exact(gang, 20)


async def test_a_node_that_falls_silent_is_named_while_its_end_is_not_proven(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for a node without power, nothing proves its death until the operator declares it gone."""
    for module in ("breaks", "recover"):
        monkeypatch.setattr(f"everstep_agent.coordinator.{module}.SILENT_SECONDS", 1.0)
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
        found = await asyncio.wait_for(gang.tasks[1], 120)
        assert found.cause is report.Cause.WORKER_DIED
        assert found.exit_code() == report.EXIT_TRY_AGAIN
        assert "3 workers in a row" in found.message
        assert not gang.tasks[0].done()
        gang.stub["STUB_MODE"] = ""
        await gang.start(1, 1)
        ends = await gang.reports()
        assert {r.cause for r in ends.values()} == {report.Cause.DONE}
        assert ends[1].incarnation == 2
        await assert_exact(gang, 20)


async def test_a_script_that_fails_in_a_new_pod_before_it_has_heard_of_the_job_does_not_end_the_job(
    tmp_path: Path,
) -> None:
    """Its agent learns only then that the script has trained."""
    async with Gang(tmp_path, 2) as gang:
        await gang.until(lambda s: s.step >= 2)
        await gang.kill(1)
        gang.stub["STUB_MODE"] = "raise"
        await gang.start(1, 1)
        found = await asyncio.wait_for(gang.tasks[1], 120)
        assert found.cause is report.Cause.WORKER_DIED
        assert "3 workers in a row" in found.message
        assert "no such data set" in found.message
        gang.stub["STUB_MODE"] = ""
        await gang.start(1, 1)
        ends = await gang.reports()
        assert {r.cause for r in ends.values()} == {report.Cause.DONE}
        await assert_exact(gang, 20)


async def test_a_pod_whose_slot_has_a_newer_attempt_is_fenced(tmp_path: Path) -> None:
    async with Gang(tmp_path, 2) as gang:
        await gang.until(lambda s: s.step >= 2)
        old, worker = gang.agents[1], gang.agents[1].pod.workers.current[0]
        zombie = gang.tasks.pop(1)
        gang.want(gone=(levels.SlotAttempt(slot=1, attempt=0),))
        await gang.start(1, 1)
        gang.agents[2], gang.tasks[2] = old, zombie  # the old attempt still receives `wanted`
        found = await asyncio.wait_for(zombie, 120)
        assert found.cause is report.Cause.FENCED
        assert "attempt 1 of slot 1" in found.message
        assert not worker.alive
        ends = await gang.reports()
        assert ends[0].cause is report.Cause.DONE
        entries = (await gang.run_log()).entries
        claimed = next(i for i, e in enumerate(entries) if isinstance(e, log.Claim) and e.epoch > 1)
        assert all(e.epoch > 1 for e in entries[claimed:]), "epoch 1 wrote after the claim"
        await assert_exact(gang, 20)

"""Survivors have joined another coordinator's epoch by the time that they are claimed. Real ranks under real
agents. No rank's state may be lost.
"""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from agent.gang import Gang, assert_exact
from everstep import Job, run
from everstep_agent.coordinator import regroup
from everstep_agent.peers.agent_report import AgentReport
from everstep_agent.pod import spawn
from runtime import a_paced_script
from runtime.test_regroup_agents import STEPS, a_script

DEADLY = 6


def let_join_elsewhere(
    gang: Gang, late: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> list[int]:
    """Act as a rival coordinator that lets these agents join its epoch just before theirs is
    published. Returns a list of those that have.
    """
    publish, joined = regroup.begin, list[int]()

    def begin(term: Any, epoch: Any, cause: str) -> None:
        for slot in late if epoch.number == 2 else ():
            pod = gang.agents[slot].pod
            pod.epoch.join(epoch.number + 1, "of a rival")
            joined.append(slot)
        publish(term, epoch, cause)

    monkeypatch.setattr(regroup, "begin", begin)
    return joined


async def assert_no_step_lost(gang: Gang) -> None:
    incidents = {i.id: i for s in gang.history for i in s.incidents}
    assert sum(i.steps_lost for i in incidents.values()) == 0
    assert "event=epoch_adopted" in gang.shown()
    assert gang.seen.done
    await assert_exact(gang, STEPS)


def delay_reports(gang: Gang, slot: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this agent report three more times that it is in epoch 1 once it has entered epoch 2."""
    pod = gang.agents[slot].pod
    build, newest, left = pod.build_report, pod.build_report(time.monotonic()), 3

    def build_late(now: float) -> AgentReport:
        nonlocal newest, left
        report = build(now)
        if report.epoch == 2 and left:
            left -= 1
        else:
            newest = report
        return newest

    monkeypatch.setattr(pod, "build_report", build_late)


@pytest.mark.parametrize(
    ("late", "delayed"),
    [
        pytest.param((1, 2), None, marks=pytest.mark.long),
        pytest.param((2,), None, marks=pytest.mark.long),
        ((2,), 1),
    ],
    ids=["all survivors", "one of them", "one of them, and the report of the other is late"],
)
async def test_survivors_that_cannot_enter_the_claimed_epoch_go_on_in_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: tuple[int, ...], delayed: int | None
) -> None:
    spawner = spawn.ForkSpawner(lambda: run(a_script, seed=2))
    monkeypatch.setattr(spawn, "SubprocessSpawner", lambda _: spawner)
    async with Gang(tmp_path, 3, in_place=1, hang_seconds=60.0) as gang:
        joined = let_join_elsewhere(gang, late, monkeypatch)
        await gang.until(lambda s: s.step >= 5)
        if delayed is not None:
            delay_reports(gang, delayed, monkeypatch)
        os.kill(gang.worker(0), signal.SIGKILL)
        await gang.reports()
        assert tuple(joined) == late
        claims = (await gang.run_log()).claims
        assert claims[1].epoch == 2
        assert max((link.last_step for link in claims[2].chain), default=0) >= 5, (
            "they restarted from step 0"
        )
        await assert_no_step_lost(gang)


def die_after_the_sums(job: Job) -> None:
    """Rank 0 dies once the sums of a step are complete. The others apply that step meanwhile."""

    def pause(step: int) -> None:
        if step == DEADLY and job.epoch == 1:
            if job.rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(1.0)
        time.sleep(0.02)

    a_paced_script.main(job, STEPS, pause)


@pytest.mark.parametrize("restart", [False, True], ids=["in place", "all restart"])
async def test_a_step_that_they_had_applied_and_not_counted_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restart: bool
) -> None:
    """The claim says that it belongs to the epoch that never began."""
    spawner = spawn.ForkSpawner(lambda: run(die_after_the_sums, seed=2))
    monkeypatch.setattr(spawn, "SubprocessSpawner", lambda _: spawner)
    if restart:
        monkeypatch.setattr(regroup, "_take_back", lambda term: False)
    async with Gang(tmp_path, 3, in_place=1, hang_seconds=60.0) as gang:
        joined = let_join_elsewhere(gang, (1, 2), monkeypatch)
        await gang.reports()
        assert joined == [1, 2]
        log = await gang.run_log()
        assert log.claims[1].chain[-1].last_step == DEADLY - 1
        if restart:
            assert (log.commits[0].epoch, log.commits[0].step) == (2, DEADLY)
        await assert_no_step_lost(gang)

"""Nodes that fall silent, as after a loss of power. Real agents, forked workers with torch, and a network that carries
nothing from or to the lost node.
"""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent.gang import assert_exact, stop_while_it_computes
from agent.network import Network, SplitGang, routed
from agent.test_launcher import Run
from agent.test_run import pid_of_agent
from everstep import Job, run
from everstep_agent.coordinator import regroup
from everstep_agent.local import launcher
from everstep_agent.pod import spawn
from everstep_contract import levels, report
from runtime import a_paced_script

STEPS = 150
LEARNT = 70
"""Steps after which each rank has learned its limit."""


class PoweredGang(SplitGang):
    """A gang whose nodes can lose their power."""

    def __init__(self, tmp_path: Path, network: Network, count: int, **settings: object) -> None:
        super().__init__(tmp_path, count, in_place=1, hang_seconds=60.0, **settings)
        self.network = network
        self.lost: list[asyncio.Task[report.ExitReport]] = []

    async def lose_power(self, slot: int) -> None:
        """Stop the slot's rank, and cut off its agent. The agent itself continues, so this is also a partition.
        Because its rank seems to compute, it does not suspect the others. It must not end the stopped rank: that
        would close the rank's connections to the others, as a lost node never does.
        """
        pod = self.agents[slot].pod
        await stop_while_it_computes(pod.workers.current[0])
        setattr(pod._hang_watch, "look", lambda *_: None)  # noqa: B010 no type checker lets a method be assigned
        self.network.cut({self.agents[slot].me.address})

    def forget(self, slot: int) -> None:
        """Do not wait for this slot's end."""
        self.lost.append(self.tasks.pop(slot))

    async def __aexit__(self, *args: object) -> None:
        for task in self.lost:
            task.cancel()
        await asyncio.gather(*self.lost, return_exceptions=True)
        await super().__aexit__(*args)


@pytest.fixture
async def network(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Network]:
    made = Network()
    with routed(made, monkeypatch):
        yield made
    await made.close()


@pytest.fixture(autouse=True)
def paced(monkeypatch: pytest.MonkeyPatch) -> None:
    def main(job: Job) -> None:
        a_paced_script.main(job, STEPS, lambda step: time.sleep(0.02))

    forked = spawn.ForkSpawner(lambda: run(main, seed=2))
    monkeypatch.setattr(spawn, "SubprocessSpawner", lambda _: forked)


@pytest.mark.parametrize(
    "victim", [pytest.param(2, marks=pytest.mark.long), 0], ids=["another pod", "the coordinator's"]
)
async def test_a_majority_goes_on_in_place_without_a_node_that_falls_silent(
    tmp_path: Path, network: Network, victim: int
) -> None:
    others = [slot for slot in range(3) if slot != victim]
    async with PoweredGang(tmp_path, network, 3) as gang:
        await gang.until(lambda s: s.step >= LEARNT)
        survivors = [gang.worker(slot) for slot in others]
        await gang.lose_power(victim)
        gang.forget(victim)
        began = time.monotonic()
        await gang.until(lambda s: s.epoch == 2 and s.running and s.step > LEARNT, 60)
        print(f"{time.monotonic() - began:.2f} s from the loss to the next epoch")
        await gang.until(lambda s: any(not i.open for i in s.incidents))
        assert [gang.worker(slot) for slot in others] == survivors
        incident = gang.seen.incidents[0]
        assert (incident.rung, incident.steps_lost) == ("regroup", 0)
        assert (incident.cause, incident.slot) == ("AgentLost", victim)
        await gang.reports()
        claims = (await gang.run_log()).claims
        assert [len(c.members) for c in claims] == [3, 2]
        assert claims[1].left_out[0].why == "left behind by the majority"
        await assert_exact(gang, STEPS)


async def test_half_of_the_ranks_wait_in_place_until_the_operator_lets_the_others_be_left_out(
    tmp_path: Path, network: Network
) -> None:
    async with PoweredGang(tmp_path, network, 2) as gang:
        await gang.until(lambda s: s.step >= LEARNT)
        survivor = gang.worker(1)
        await gang.lose_power(0)
        gang.forget(0)
        silent = levels.SlotAttempt(slot=0, attempt=0)
        await gang.until(lambda s: s.silent == (silent,) and s.incidents, 60)
        assert gang.seen.epoch == 1
        gang.want(yields=(levels.Yield(slot=0, attempt=0, epoch=1),))
        await gang.until(lambda s: s.epoch == 2 and s.running)
        assert gang.seen.yielded == gang.wanted.yields
        await gang.until(lambda s: any(not i.open for i in s.incidents))
        incident = gang.seen.incidents[0]
        assert (incident.cause, incident.slot) == ("AgentLost", 0), (
            "the operator finds its move by the slot"
        )
        await gang.reports()
        assert gang.worker(1) == survivor
        await assert_exact(gang, STEPS)


async def test_what_a_minority_holds_outlives_its_rank(
    tmp_path: Path, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regroup, "HOLD_SECONDS", 0.5)
    async with PoweredGang(tmp_path, network, 2) as gang:
        await gang.until(lambda s: s.step >= LEARNT)
        await gang.lose_power(0)
        gang.forget(0)
        pod = gang.agents[1].pod
        worker = pod.workers.current[0]
        await gang.until(lambda _: worker.whole >= LEARNT, 60)
        held = worker.whole
        os.kill(gang.worker(1), signal.SIGKILL)
        await gang.until(lambda s: s.incidents and s.incidents[-1].cause == "WorkerDied")
        gang.want(gone=(levels.SlotAttempt(slot=0, attempt=0),))
        await gang.start(0, 1)
        await gang.until(lambda s: any(not i.open for i in s.incidents), 60)
        incident = gang.seen.incidents[-1]
        assert (incident.rung, incident.step, incident.steps_lost) == ("restart", held, 0)
        await gang.reports()
        await assert_exact(gang, STEPS)


@pytest.mark.long
async def test_a_node_that_speaks_again_goes_on_with_the_others_and_nobody_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the agents are processes, so that a whole node can stand still."""
    monkeypatch.setattr(launcher, "MISSED_ANSWERS", 10**6)
    monkeypatch.setenv("PACED_STEPS", "100")
    run = Run(tmp_path, script=a_paced_script.__file__)
    running = asyncio.create_task(run.launcher.run())
    worker = int((await run.line(r"rank 0 runs as pid (\d+)"))[1])
    async with asyncio.timeout(60):
        while run.launcher.seen.step < 5:  # noqa: ASYNC110 told twice a second
            await asyncio.sleep(0.05)
    node = (pid_of_agent(worker), worker)
    for pid in node:
        os.kill(pid, signal.SIGSTOP)
    async with asyncio.timeout(60):
        while not run.launcher.seen.incidents:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    for pid in node:
        os.kill(pid, signal.SIGCONT)
    await run.line(r"recovered in .* steps lost: 0")
    assert await running == 0
    assert sum("runs as pid" in line for line in run.said) == 2, "a rank restarted"

"""Real ranks keep stepping without a coordinator."""

import asyncio
from pathlib import Path

import pytest
import torch

from agent.gang import Gang, assert_exact
from everstep import Job, run
from everstep_agent.coordinator import boundary_turn
from everstep_agent.pod import spawn
from everstep_contract import report

STEPS = 60


def a_script(job: Job) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    job.track(model=model, optimizer=optimizer)
    data = job.batches(list(range(1000)), global_batch=4, micro_batch=2)
    pause = asyncio.Event()
    for step in job.steps(until=STEPS):
        for batch in step.batches(data):
            step.backward(model(torch.tensor([[i / 1e3, 1.0] for i in batch])).mean())
        optimizer.step()
        asyncio.run(_wait(pause))


async def _wait(event: asyncio.Event) -> None:
    await asyncio.wait([asyncio.create_task(event.wait())], timeout=0.05)


async def test_a_fault_of_the_coordinator_ends_no_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everstep_agent.coordinator.faults.REST_SECONDS", (0.5, 0.5, 0.5))
    forked = spawn.ForkSpawner(lambda: run(a_script, seed=2))
    monkeypatch.setattr(spawn, "SubprocessSpawner", lambda _: forked)
    settle, raised = boundary_turn.settle, []

    def fault(*given: object) -> bool:
        if not raised:
            raised.append(gang.seen.step)
            raise KeyError("as told")
        return settle(*given)  # type: ignore[arg-type]

    async with Gang(tmp_path, 2, hang_seconds=60.0) as gang:
        await gang.until(lambda s: s.step >= 3)
        monkeypatch.setattr(boundary_turn, "settle", fault)
        ends = await gang.reports()
        assert {r.cause for r in ends.values()} == {report.Cause.DONE}
        assert raised
        assert [c.epoch for c in (await gang.run_log()).claims] == [1]
        await assert_exact(gang, STEPS)

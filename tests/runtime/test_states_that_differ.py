"""A job whose state has other shapes on some ranks makes no checkpoint: its first save fails it."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from agent.gang import Gang
from everstep import Job, run
from everstep_agent.pod import spawn
from everstep_contract import report


class Held:
    """An object whose size its rank chooses."""

    def __init__(self, rows: int) -> None:
        self.rows = torch.zeros(rows, 2)

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows = state["rows"]


def a_script(job: Job) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # Small beside the rest: only the first rank would store it, with the shape that it has there.
    job.track(held=Held(3 if job.rank < 2 else 5), model=model, optimizer=optimizer)
    data = job.batches(list(range(1000)), global_batch=6, micro_batch=2)
    for step in job.steps(until=4):
        for batch in step.batches(data):
            step.backward(model(torch.tensor([[float(i), 1.0] for i in batch])).mean())
        optimizer.step()


async def test_a_tensor_whose_shape_differs_by_rank_fails_the_job_at_its_first_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forked = spawn.ForkSpawner(lambda: run(a_script, seed=2))
    monkeypatch.setattr(spawn, "SubprocessSpawner", lambda _: forked)
    async with asyncio.timeout(100), Gang(tmp_path, 3, save_every_steps=2) as gang:
        ends = await gang.reports(60)
    assert {r.cause for r in ends.values()} == {report.Cause.MISUSE}
    message = ends[0].message
    assert "held/rows" in message
    assert "float32 (3, 2) on ranks 0, 1" in message
    assert "float32 (5, 2) on rank 2" in message
    assert ends[0].step == 0, "nothing was committed"

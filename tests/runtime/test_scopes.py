"""A rank is killed outside a step's forward and backward: while it loads data, in an evaluation, in a
pause, or at start-up. Real agents, forked workers with torch.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from agent.gang import Gang, assert_exact
from everstep import Job, run
from everstep_agent.pod import spawn

STEPS = 6
LATER = ("startup", "evaluation", "pause")


class Samples(torch.utils.data.Dataset):
    """A dataset that calls `hit` for each sample that is fetched."""

    def __init__(self, hit: Callable[[], None]) -> None:
        self._hit = hit
        self._inputs = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self._hit()
        x = self._inputs[index]
        return x, x.sum(0, keepdim=True)


def a_script(where: str, flag: Path) -> Callable[[Job], None]:
    """Return a script whose rank 1 kills itself once, at `where`; the flag file records that."""

    def main(job: Job) -> None:
        at = [0]

        def die(here: str, *, step: int = 3) -> None:
            if here == where and job.rank == 1 and at[0] == step and not flag.exists():
                flag.touch()
                os.kill(os.getpid(), signal.SIGKILL)

        die("startup", step=0)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        job.track(model=model, optimizer=optimizer)
        data = job.batches(Samples(lambda: die("loading")), global_batch=4, micro_batch=1)
        held_out = job.batches(Samples(lambda: None), global_batch=4, micro_batch=1)
        for step in job.steps(until=STEPS):
            at[0] = step.number
            for x, y in step.batches(data):
                step.backward(torch.nn.functional.mse_loss(model(x), y))
            optimizer.step()
            with job.pause("export", limit=60):
                die("pause")
            total = 0.0
            for x, y in job.evaluate(held_out):
                die("evaluation")
                total += float(torch.nn.functional.mse_loss(model(x), y))
            job.sum(total)

    return main


@pytest.mark.parametrize(
    "where", ["loading", *(pytest.param(w, marks=pytest.mark.long) for w in LATER)]
)
async def test_a_rank_that_dies_outside_of_a_step_costs_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    flag = tmp_path / "flag"

    def work() -> None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        run(a_script(where, flag), seed=3)

    forked = spawn.ForkSpawner(work)
    monkeypatch.setattr(spawn, "SubprocessSpawner", lambda _: forked)
    async with Gang(tmp_path, 2) as gang:
        seen: Any = await gang.until(lambda s: s.done, 120)
        await gang.reports()
        assert flag.exists()
        (incident,) = seen.incidents
        assert (incident.cause, incident.rank, incident.steps_lost) == ("WorkerDied", 1, 0)
        assert incident.step in {"startup": (0,), "loading": (2, 3)}.get(where, (3,))
        await assert_exact(gang, STEPS)

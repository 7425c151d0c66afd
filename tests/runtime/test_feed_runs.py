"""A run whose script was edited between two starts: which samples it used, and what
`everstep verify` says about it.
"""

import asyncio
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from agent.gang import Gang
from everstep import Job, run
from everstep_agent import cli
from everstep_agent.pod import spawn
from everstep_contract import report


def a_script(job: Job, *, until: int, batch: int, size: int, on_change: str) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    job.track(model=model, optimizer=optimizer)
    dataset = TensorDataset(torch.arange(float(size)).unsqueeze(1))
    data = job.batches(dataset, global_batch=batch, micro_batch=2, on_change=on_change)
    for step in job.steps(until=until):
        for (x,) in step.batches(data):
            step.backward(model(x).square().mean())
        optimizer.step()


class Runs:
    """Several jobs, one after another, of the same run."""

    def __init__(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        self.folder, self.started = folder, 0
        self._monkeypatch, self._capsys = monkeypatch, capsys

    async def train(
        self, *, until: int, batch: int = 12, size: int = 48, on_change: str = "Refuse"
    ) -> tuple[report.Cause, str]:
        """Train; return how the job ended, and all notes."""
        script = partial(a_script, until=until, batch=batch, size=size, on_change=on_change)
        forked = spawn.ForkSpawner(lambda: run(script))
        self._monkeypatch.setattr(spawn, "SubprocessSpawner", lambda _: forked)
        self.started += 1
        async with asyncio.timeout(100), Gang(self.folder, 1, uid=f"uid-{self.started}") as gang:
            end = (await gang.reports(60))[0]
            notes = {note for seen in gang.history for note in seen.notes}
            self.samples = [i for e in (await gang.verified()).entries for i in e.samples]
        return end.cause, "\n".join([end.message, *notes])

    async def verify(self) -> tuple[int, str]:
        command = ["verify", f"{self.folder}/store/ns/job"]
        status = await asyncio.to_thread(cli.run, command)
        return status, self._capsys.readouterr().out


@pytest.fixture
async def half_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Runs:
    """Four steps of 12 samples, so that each of the 48 samples is used once."""
    runs = Runs(tmp_path, monkeypatch, capsys)
    assert (await runs.train(until=4))[0] is report.Cause.DONE
    return runs


async def test_a_smaller_global_batch_repeats_no_sample_and_verify_says_so(
    half_a_run: Runs,
) -> None:
    cause, noted = await half_a_run.train(until=8, batch=6)
    assert cause is report.Cause.DONE
    assert "global_batch was 12, is 6: it goes on with the next unused sample" in noted
    samples = half_a_run.samples
    assert Counter(samples[:48]) == Counter(range(48))
    assert max(Counter(samples[48:]).values()) == 1
    assert samples[48:] != samples[24:48], "the second pass repeats half of the first"
    status, shown = await half_a_run.verify()
    assert status == 0
    assert "NOTE    feed 1, step 5: global_batch was 12, is 6" in shown
    assert "ok      steps 1 to 8 once each, 72 samples, none lost or repeated" in shown


async def test_another_dataset_is_refused_unless_the_script_insists(half_a_run: Runs) -> None:
    cause, said = await half_a_run.train(until=8, size=60)
    assert cause is not report.Cause.DONE
    assert "the run cannot continue exactly after step 4: length was 48 samples, is 60" in said
    cause, _ = await half_a_run.train(until=8, size=60, on_change="Continue")
    assert cause is report.Cause.DONE
    status, shown = await half_a_run.verify()
    assert status == 1
    assert "PROBLEM feed 1: the order changed at step 5: length was 48 samples, is 60" in shown

"""`job.save` saves the current step at its end, under the names that the script gives."""

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from agent.gang import Gang, assert_exact
from everstep import Job, run
from everstep_agent.checkpoint.chunk_upload import Uploader
from everstep_agent.coordinator import due_saves
from everstep_agent.pod import spawn
from everstep_contract import report, wire
from runtime.a_job import Trial


def staged(trial: Trial) -> list[tuple[int, tuple[str, ...]]]:
    trial.session.saves.copier.wait()
    return [(s.step, s.pins) for s in trial.agent.of(wire.Staged)]


def test_it_saves_the_end_of_the_step_in_which_it_is_called(tmp_path: Path) -> None:
    trial = Trial(tmp_path).track()
    for step in trial.job.steps(until=5):
        if step.number == 2:
            trial.job.save(pin="epoch-1")
            trial.job.save(pin="best")
            trial.job.save(pin="epoch-1")
        if step.number == 3:
            trial.job.save()
        trial.take(step)
    assert staged(trial) == [(2, ("epoch-1", "best")), (3, ()), (5, ())]


def test_the_last_step_is_saved_once_and_pinned(tmp_path: Path) -> None:
    trial = Trial(tmp_path).track()
    for step in trial.job.steps(until=2):
        trial.take(step)
        if step.number == 2:
            trial.job.save(pin="end")
    assert staged(trial) == [(2, ("end",))]


def test_a_save_that_finds_no_room_still_tells_the_names(tmp_path: Path) -> None:
    trial = Trial(tmp_path).track()
    trial.agent.uploads = False  # the slots stay in use
    steps = trial.job.steps(until=4)
    for number in (1, 2, 3):
        step = next(steps)
        trial.job.save(pin=f"step-{number}")
        trial.take(step)
    next(steps)
    trial.session.saves.copier.wait()
    told = trial.agent.of(wire.Staged)
    assert [(s.step, s.pins) for s in told if s.problem] == [(3, ("step-3",))]


PINNED, UNTIL = 5, 60


def a_script(job: Job) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job.track(model=model, optimizer=optimizer)
    data = job.batches(list(range(1000)), global_batch=6, micro_batch=2)
    for step in job.steps(until=UNTIL):
        for batch in step.batches(data):
            time.sleep(0.02)
            step.backward(model(torch.tensor([[float(i), 1.0] for i in batch])).mean())
        optimizer.step()
        if step.number == PINNED:
            job.save(pin="epoch-1")


async def test_a_name_outlives_a_save_that_a_loss_in_place_drops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The survivors are past the step that called `job.save`, so nobody calls it again."""
    forked = spawn.ForkSpawner(lambda: run(a_script))
    monkeypatch.setattr(spawn, "SubprocessSpawner", lambda _: forked)
    upload = Uploader.upload

    async def withhold(self: Uploader, staged: wire.Staged, *rest: Any) -> Any:
        if staged.step == PINNED:
            await asyncio.Event().wait()
        return await upload(self, staged, *rest)

    monkeypatch.setattr(Uploader, "upload", withhold)
    monkeypatch.setattr(due_saves, "PIN_SECONDS", 0.3)
    async with asyncio.timeout(100), Gang(tmp_path, 3, in_place=1) as gang:
        await gang.until(lambda s: s.step >= PINNED + 2)
        os.kill(gang.worker(1), signal.SIGKILL)
        ends = await gang.reports(60)
        assert {r.cause for r in ends.values()} == {report.Cause.DONE}
        index = (await gang.run_log()).index
        assert PINNED < index.pins["epoch-1"].step < UNTIL
        assert len([c for c in index.commits if c.pins]) == 1
        await assert_exact(gang, UNTIL)

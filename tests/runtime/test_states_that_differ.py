"""Ranks whose states differ in shapes or in values."""

import asyncio
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from agent.gang import Gang, assert_exact
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
    # It is small compared with the rest, so only the first rank would store it, with that rank's shape.
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
    assert ends[0].step == 0, "a checkpoint was committed"


STEPS, EVERY, FLIP = 24, 6, 9


def a_script_with_a_flipped_bit(job: Job, *, rank: int, folder: Path) -> None:
    """In epoch 1, step 9 leaves another value in one weight of `rank`. The ranks agree at a save
    before that: the step waits for its manifest.
    """
    model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    job.track(model=model, optimizer=optimizer)
    data = job.batches(list(range(1000)), global_batch=6, micro_batch=2)
    for step in job.steps(until=STEPS):
        for batch in step.batches(data):
            inputs = torch.tensor([[i / 1000, 1.0] for i in batch])
            step.backward(model(inputs).square().mean())
        optimizer.step()
        while step.number == FLIP and not list(folder.glob("store/**/manifests/*")):
            time.sleep(0.01)
        if (job.epoch, job.rank, step.number) == (1, rank, FLIP):
            model[2].weight.detach().numpy().view("uint32")[0, 3] ^= 1 << 12


async def the_losses(folder: Path, monkeypatch: pytest.MonkeyPatch, rank: int) -> tuple[Any, Any]:
    """Run to the end; return the losses and the last `seen`."""
    await asyncio.to_thread(folder.mkdir)
    spawner = spawn.ForkSpawner(
        lambda: run(partial(a_script_with_a_flipped_bit, rank=rank, folder=folder), seed=2)
    )
    monkeypatch.setattr(spawn, "SubprocessSpawner", lambda _: spawner)
    async with asyncio.timeout(100), Gang(folder, 3, in_place=1, save_every_steps=EVERY) as gang:
        ends = await gang.reports(60)
        assert {r.cause for r in ends.values()} == {report.Cause.DONE}
        await assert_exact(gang, STEPS)
        return [e.losses for e in (await gang.verified()).entries], gang.seen


async def test_a_flipped_bit_in_one_rank_is_found_at_the_next_save_and_nothing_of_it_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disturbed, seen = await the_losses(tmp_path / "flipped", monkeypatch, rank=2)
    undisturbed, _ = await the_losses(tmp_path / "sound", monkeypatch, rank=-1)
    assert disturbed == undisturbed
    incident = seen.incidents[0]
    assert (incident.cause, incident.rank, incident.slot) == ("ReplicasDiffer", 2, 2)
    assert "rank 2 differs from the others in model/2.weight" in incident.message
    assert (incident.step, incident.rung) == (EVERY, "restart")
    assert incident.steps_lost >= EVERY, "the steps since the checkpoint are counted as lost"


def a_script_with_state_of_its_own(job: Job) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job.track(model=model, optimizer=optimizer, own=torch.full((40,), float(job.rank == 0)))
    data = job.batches(list(range(1000)), global_batch=6, micro_batch=2)
    for step in job.steps(until=4):
        for batch in step.batches(data):
            step.backward(model(torch.tensor([[float(i), 1.0] for i in batch])).mean())
        optimizer.step()


async def test_values_that_differ_at_the_first_save_fail_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forked = spawn.ForkSpawner(lambda: run(a_script_with_state_of_its_own, seed=2))
    monkeypatch.setattr(spawn, "SubprocessSpawner", lambda _: forked)
    async with asyncio.timeout(100), Gang(tmp_path, 2, save_every_steps=2) as gang:
        ends = await gang.reports(60)
    assert {r.cause for r in ends.values()} == {report.Cause.MISUSE}
    assert "the ranks differ in own, and there is no majority" in ends[0].message
    assert "Track with job.track what is the same on every rank" in ends[0].message
    assert ends[0].message.endswith("the rest with job.track_local")

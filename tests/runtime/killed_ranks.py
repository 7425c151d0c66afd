"""The script for tests that kill ranks at any moment of a step, and the checks of the other ranks."""

import time
from collections.abc import Callable

import pytest
import torch
from torch import nn

from everstep import Job
from everstep_contract import wire
from runtime.a_sharded_job import whole
from runtime.an_agent import Agent, await_end
from runtime.test_ranks import a_dataset, a_model

STEPS = 12


def a_script(
    before: Callable[[Job], None] = lambda job: None,
    after: Callable[[Job, int], None] = lambda job, step: None,
    build: Callable[[Job], nn.Module] = lambda job: a_model(),
) -> Callable[[Job], None]:
    """`before` is called before the first step, `after` at the end of each."""

    def main(job: Job) -> None:
        torch.set_num_threads(1)
        model = build(job)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        job.track(model=model, optimizer=optimizer)
        job._session.reducer._bucket_bytes = 256
        data = job.batches(a_dataset(), global_batch=22, micro_batch=2)
        before(job)
        for step in job.steps(until=STEPS):
            if step.number == STEPS:
                await_end()
            for inputs, wanted in step.batches(data):
                step.backward(nn.functional.cross_entropy(model(inputs), wanted))
                time.sleep(0.002)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            digest = sum(float(whole(p).double().abs().sum()) for p in model.parameters())
            place = f"{job.rank} of {job.world_size} in {job.epoch}"
            print(f"state {step.number} {digest.hex()} {torch.rand(1).item()}", flush=True)
            print(f"step {step.number}: rank {place}", flush=True)
            after(job, step.number)

    return main


def entries(ours: Agent, rank: int) -> list[wire.Applied]:
    return ours.workers[rank].of(wire.Applied)


def states(ours: Agent) -> set[tuple[str, ...]]:
    """Return (step, digest of the parameters, next random number) of all ranks."""
    lines = ours.output().splitlines()
    return {tuple(line.split()[1:]) for line in lines if line.startswith("state ")}


def assert_exact(ours: Agent, undisturbed: list[wire.Applied], living: list[int]) -> None:
    """These ranks ended well. They took each step once, used each sample once, and have equal norms and states."""
    statuses = [ours.workers[r].status for r in living]
    assert statuses == [0] * len(living), f"{statuses}\n{ours.output()[-6000:]}"
    first = entries(ours, living[0])
    assert [a.step for a in first] == list(range(1, STEPS + 1))
    for rank in living[1:]:
        assert [a.entries for a in entries(ours, rank)] == [a.entries for a in first]
        assert [a.grad_norm for a in entries(ours, rank)] == [a.grad_norm for a in first]
    for was, now in zip(undisturbed, first, strict=True):
        assert now.entries[0].samples == was.entries[0].samples
        assert set(now.entries[0].counts) == {1}
        assert now.loss == pytest.approx(was.loss, abs=1e-4)
    assert len(states(ours)) == STEPS, "survivors hold different states"

"""Ranks of units are killed at any moment of a step: their units end, the others continue the step in lockstep, and
the sums stay exact.
"""

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from everstep import Job, run
from everstep_contract import wire
from everstep_contract.units import Mesh
from runtime.an_agent import Agent, agent, await_end
from runtime.test_ranks import a_dataset

STEPS = 12
SHARD, TENSOR, BOTH = Mesh(shard=2), Mesh(tensor=2), Mesh(shard=2, tensor=2)
PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}


def a_script(before: Callable[[Job], None] = lambda job: None) -> Callable[[Job], None]:
    def main(job: Job) -> None:
        torch.set_num_threads(1)
        model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 2))
        mesh = job._session.start.mesh
        if mesh.tensor > 1:
            parallelize_module(model, job.mesh["tensor"], PLAN)
        if mesh.shard > 1:
            for layer in model:
                if isinstance(layer, nn.Linear):
                    fully_shard(layer, mesh=job.mesh["shard"])
            fully_shard(model, mesh=job.mesh["shard"])
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
            whole: list[Any] = list(model.parameters())
            digest = sum(float(p.full_tensor().detach().double().abs().sum()) for p in whole)
            print(f"state {step.number} {digest.hex()} {torch.rand(1).item()}", flush=True)

    return main


def entries(ours: Agent, rank: int) -> list[wire.Applied]:
    return ours.workers[rank].of(wire.Applied)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[wire.Applied]]:
    """By mesh, filled by the first test that needs it."""
    return {}


def run_undisturbed(folder: Path, mesh: Mesh, known: dict[str, list[wire.Applied]]) -> Any:
    if str(mesh) not in known:
        (folder / "undisturbed").mkdir()
        with agent(
            folder / "undisturbed", lambda: run(a_script(), seed=4), mesh.unit, mesh=mesh
        ) as ours:
            ours.finish()
            known[str(mesh)] = entries(ours, 0)
    return known[str(mesh)]


def assert_exact(ours: Agent, undisturbed: list[wire.Applied]) -> None:
    """Survivors took each step once, with each sample once, with equal norms and equal states."""
    living = [w.rank for w in ours.workers if w.status == 0]
    assert living, f"{[w.status for w in ours.workers]}\n{ours.output()[-6000:]}"
    mesh = ours._start.mesh
    assert len(living) % mesh.unit == 0
    for rank in living:
        told = entries(ours, rank)
        assert [a.step for a in told] == list(range(1, STEPS + 1))
        assert [a.entries for a in told] == [a.entries for a in entries(ours, living[0])]
        assert [a.grad_norm for a in told] == [a.grad_norm for a in entries(ours, living[0])]
    for was, now in zip(undisturbed, entries(ours, living[0]), strict=True):
        assert now.entries[0].samples == was.entries[0].samples
        assert set(now.entries[0].counts) == {1}
        assert now.loss == pytest.approx(was.loss, abs=1e-4)
    lines = [line.split()[1:] for line in ours.output().splitlines() if line.startswith("state ")]
    assert len({tuple(line) for line in lines}) == STEPS, "survivors hold different states"


@pytest.mark.parametrize(
    ("mesh", "world", "seed"),
    [
        (SHARD, 6, 1),
        (TENSOR, 6, 2),
        *(
            pytest.param(mesh, world, seed, marks=pytest.mark.long)
            for mesh, world in [(SHARD, 6), (TENSOR, 6), (BOTH, 12)]
            for seed in range(10, 22)
        ),
    ],
    ids=str,
)
def test_ranks_killed_at_random_moments_cost_nothing(
    tmp_path: Path, undisturbed: dict[str, list[wire.Applied]], mesh: Mesh, world: int, seed: int
) -> None:
    expected = run_undisturbed(tmp_path, mesh, undisturbed)
    chance = random.Random(seed)
    with agent(tmp_path, lambda: run(a_script(), seed=4), world, mesh=mesh) as ours:
        for number in range(world // mesh.unit - 1):
            living = [w.rank for w in ours.living]
            ours.wait_applied(2 + 3 * number, living)
            time.sleep(chance.random() * 0.05)
            ours.kill(chance.choice(living))
            ours.regroup()
        ours.finish()
        assert_exact(ours, expected)


@pytest.mark.long
@pytest.mark.parametrize("mesh", [SHARD, TENSOR], ids=str)
def test_a_unit_that_is_lost_while_the_others_regroup(
    tmp_path: Path, undisturbed: dict[str, list[wire.Applied]], mesh: Mesh
) -> None:
    expected = run_undisturbed(tmp_path, mesh, undisturbed)
    with agent(tmp_path, lambda: run(a_script(), seed=4), 6, mesh=mesh) as ours:
        ours.wait_applied(3, range(6))
        for rank in (2, 3):
            os.kill(ours.workers[rank].pid, signal.SIGKILL)
        ours.wait_ended([2, 3])
        ours.regroup(before_start=lambda: ours.kill(5))
        ours.regroup()
        ours.finish()
        assert_exact(ours, expected)


def kill_in(phase: str, victim: int) -> Callable[[Job], None]:
    """Rank `victim` kills itself in step 5, where the name says."""

    def before(job: Job) -> None:
        if job.rank != victim:
            return
        session = job._session
        thing, name = {
            "backward": (session.reducer, "_add"),
            "sums": (session.reducer, "flush"),
            "vector": (session.reducer, "end"),
            "complete": (session.membership, "complete"),
            "norm": (session.reducer, "measure"),
            "applied": (session.membership, "mark_applied"),
            "next": (session.membership, "begin"),
        }[phase]
        former = getattr(thing, name)

        def act(*given: Any, **more: Any) -> Any:
            if session.applied == (5 if phase == "next" else 4):
                os.kill(os.getpid(), signal.SIGKILL)
            return former(*given, **more)

        setattr(thing, name, act)

    return before


PHASES = ["backward", "sums", "vector", "complete", "norm", "applied", "next"]


@pytest.mark.parametrize(
    ("mesh", "phase"),
    [
        (SHARD, "complete"),
        *(pytest.param(SHARD, p, marks=pytest.mark.long) for p in PHASES if p != "complete"),
        *(pytest.param(TENSOR, p, marks=pytest.mark.long) for p in PHASES),
    ],
    ids=str,
)
def test_a_rank_that_dies_in_each_phase_costs_its_unit_and_nothing_else(
    tmp_path: Path, undisturbed: dict[str, list[wire.Applied]], mesh: Mesh, phase: str
) -> None:
    expected = run_undisturbed(tmp_path, mesh, undisturbed)
    main = a_script(kill_in(phase, victim=1))
    with agent(tmp_path, lambda: run(main, seed=4), 4, mesh=mesh) as ours:
        ours.wait_ended([1])
        ours.regroup()
        ours.finish()
        assert_exact(ours, expected)

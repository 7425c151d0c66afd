"""Ranks of units are killed at any moment of a step. Their units end, the others continue the step in lockstep, and
the sums stay exact.
"""

import os
import random
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from everstep import Job, forming, run
from everstep.store import AgentStore
from everstep_contract import wire
from everstep_contract.units import Mesh
from runtime.a_sharded_job import shard_layers
from runtime.an_agent import agent
from runtime.killed_ranks import a_script, assert_exact, entries

pytestmark = pytest.mark.usefixtures("warm_for_units")

SHARD, TENSOR, BOTH = Mesh(shard=2), Mesh(tensor=2), Mesh(shard=2, tensor=2)
PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}


def build(job: Job) -> nn.Module:
    """A model that the ranks of a unit divide."""
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 2))
    mesh = job._session.start.mesh
    if mesh.tensor > 1:
        parallelize_module(model, job.mesh["tensor"], PLAN)
    if mesh.shard > 1:
        shard_layers(model, job.mesh["shard"])
    return model


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[wire.Applied]]:
    """Results by mesh, filled by the first test that needs them."""
    return {}


def run_undisturbed(folder: Path, mesh: Mesh, known: dict[str, list[wire.Applied]]) -> Any:
    if str(mesh) not in known:
        (folder / "undisturbed").mkdir()
        with agent(
            folder / "undisturbed", lambda: run(a_script(build=build), seed=4), mesh.unit, mesh=mesh
        ) as ours:
            ours.finish()
            known[str(mesh)] = entries(ours, 0)
    return known[str(mesh)]


@pytest.mark.parametrize(
    ("mesh", "world", "seed"),
    [
        (SHARD, 6, 1),
        (TENSOR, 4, 2),
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
    with agent(tmp_path, lambda: run(a_script(build=build), seed=4), world, mesh=mesh) as ours:
        for number in range(world // mesh.unit - 1):
            living = [w.rank for w in ours.living]
            ours.wait_applied(2 + 3 * number, living)
            time.sleep(chance.random() * 0.05)
            ours.kill(chance.choice(living))
            ours.regroup()
        survivors = [w.rank for w in ours.living]
        assert len(survivors) == mesh.unit
        ours.finish()
        assert_exact(ours, expected, survivors)


@pytest.mark.long
@pytest.mark.parametrize("mesh", [SHARD, TENSOR], ids=str)
def test_a_unit_that_is_lost_while_the_others_regroup(
    tmp_path: Path, undisturbed: dict[str, list[wire.Applied]], mesh: Mesh
) -> None:
    expected = run_undisturbed(tmp_path, mesh, undisturbed)
    with agent(tmp_path, lambda: run(a_script(build=build), seed=4), 6, mesh=mesh) as ours:
        ours.wait_applied(3, range(6))
        for rank in (2, 3):
            os.kill(ours.workers[rank].pid, signal.SIGKILL)
        ours.wait_ended([2, 3])
        ours.regroup(before_start=lambda: ours.kill(5))
        ours.regroup()
        ours.finish()
        assert_exact(ours, expected, [0, 1])


def kill_in(phase: str, victim: int) -> Callable[[Job], None]:
    """Return a patch with which rank `victim` kills itself in this phase of step 5."""

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
QUICK = ["backward", "complete", "applied"]


@pytest.mark.parametrize(
    ("mesh", "phase"),
    [
        *((SHARD, p) for p in QUICK),
        (TENSOR, "complete"),
        *(pytest.param(SHARD, p, marks=pytest.mark.long) for p in PHASES if p not in QUICK),
        *(pytest.param(TENSOR, p, marks=pytest.mark.long) for p in PHASES if p != "complete"),
    ],
    ids=str,
)
def test_a_rank_that_dies_in_each_phase_costs_its_unit_and_nothing_else(
    tmp_path: Path, undisturbed: dict[str, list[wire.Applied]], mesh: Mesh, phase: str
) -> None:
    expected = run_undisturbed(tmp_path, mesh, undisturbed)
    main = a_script(kill_in(phase, victim=1), build=build)
    with agent(tmp_path, lambda: run(main, seed=4), 4, mesh=mesh) as ours:
        ours.wait_ended([1])
        ours.regroup()
        ours.finish()
        assert_exact(ours, expected, [2, 3])


def test_a_rank_that_dies_after_it_has_given_its_address_holds_no_later_group_up(
    tmp_path: Path, undisturbed: dict[str, list[wire.Applied]]
) -> None:
    """gloo waits for the dead rank's connection, for longer than this test. The next group forms beside it."""

    def before(job: Job) -> None:
        forming.FORMING = timedelta(hours=1)
        if job.rank != 5:
            return
        give = AgentStore.set

        def give_and_die(store: AgentStore, *given: Any) -> None:
            give(store, *given)
            if store._epoch == 2:
                os.kill(os.getpid(), signal.SIGKILL)

        AgentStore.set = give_and_die  # type: ignore[method-assign]

    expected = run_undisturbed(tmp_path, SHARD, undisturbed)
    main = a_script(before, build=build)
    with agent(tmp_path, lambda: run(main, seed=4), 6, mesh=SHARD) as ours:
        ours.wait_applied(2, range(6))
        ours.kill(1)
        ours.regroup()
        ours.wait_ended([5])
        ours.regroup()
        ours.finish()
        assert_exact(ours, expected, [2, 3])

"""Ranks that form units: real processes with real gloo compute the same as one process and as torch's own HSDP."""

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from everstep import Job, run, spread
from everstep import mesh as connections
from everstep.errors import Misuse
from everstep.group import LocalGroup
from everstep.membership import Membership
from everstep.unit import Over
from everstep_contract import wire
from everstep_contract.units import Mesh
from runtime import a_sharded_job
from runtime.a_job import Trial
from runtime.a_sharded_job import a_dataset, build, compare, compute, divide
from runtime.an_agent import agent

pytestmark = pytest.mark.usefixtures("warm_for_units")


@dataclass(frozen=True)
class Size:
    mesh: Mesh
    world: int = 4
    queued: bool = False
    """Gloo sums the vector, as it does for many ranks."""

    def __str__(self) -> str:
        return f"{self.world} ranks, {self.mesh}{', queued' if self.queued else ''}"


QUICK = [Size(Mesh(shard=2)), Size(Mesh(tensor=2), queued=True)]
LONG = [
    Size(Mesh(shard=4)),
    Size(Mesh(shard=2), queued=True),
    Size(Mesh(shard=2, tensor=2)),
    Size(Mesh(shard=2, tensor=2), world=8),
]


@dataclass(frozen=True)
class Outcome:
    size: Size
    ranks: list[dict[str, Any]]
    applied: list[list[wire.Applied]]


@pytest.fixture(
    scope="module",
    params=[*QUICK, *(pytest.param(size, marks=pytest.mark.long) for size in LONG)],
    ids=str,
)
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    size, folder = request.param, tmp_path_factory.mktemp("units")

    def main() -> None:
        if size.queued:
            connections.RANKS = 1
        run(lambda job: compare(job, folder), seed=4)

    with agent(folder, main, size.world, mesh=size.mesh) as ours:
        ours.finish()
        assert [w.status for w in ours.workers] == [0] * size.world, ours.output()
        applied = [w.of(wire.Applied) for w in ours.workers]
    return Outcome(size, list(a_sharded_job.list_results(folder, size.world)), applied)


def test_gradients_are_those_of_one_process(outcome: Outcome) -> None:
    for rank in outcome.ranks:
        for step in rank["steps"]:
            assert step["gradients"].keys() == step["beside"].keys()
            for name, found in step["gradients"].items():
                wanted = step["beside"][name]
                close = 1e-2 if "narrow" in name else 1e-5
                torch.testing.assert_close(
                    found, wanted, rtol=close, atol=close, msg=lambda m, n=name: f"{n}: {m}"
                )


def test_sharded_gradients_are_torchs_own_bit_for_bit(outcome: Outcome) -> None:
    if outcome.size.mesh.tensor > 1:
        pytest.skip("HSDP has no tensor dimension")
    for rank in outcome.ranks:
        assert rank["steps"][0]["passes"] > 1
        for name, part in rank["hsdp"].items():
            assert torch.equal(rank["parts"][name], part), name


def test_all_ranks_hold_the_same_model_and_tell_the_same(outcome: Outcome) -> None:
    first = outcome.ranks[0]
    for rank in outcome.ranks[1:]:
        for name, value in rank["parameters"].items():
            assert torch.equal(value, first["parameters"][name]), name
    told = [[(a.loss, a.grad_norm, a.entries) for a in own] for own in outcome.applied]
    assert all(own == told[0] for own in told)
    assert all(set(a.entries[0].counts) == {1} for a in outcome.applied[0])


def test_the_norm_is_that_of_the_whole_model(outcome: Outcome) -> None:
    for step, applied in zip(outcome.ranks[0]["steps"], outcome.applied[0], strict=True):
        assert applied.grad_norm == pytest.approx(step["norm"], rel=1e-3)


def test_torchs_clipping_works_in_a_unit(outcome: Outcome) -> None:
    for rank in outcome.ranks:
        norm, wanted_norm, found, wanted = rank["clipped"]
        assert norm == pytest.approx(wanted_norm, rel=1e-4)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)


def test_buffers_follow_micro_batch_0(outcome: Outcome) -> None:
    for rank in outcome.ranks:
        for step in rank["steps"]:
            for name, found in step["buffers"].items():
                torch.testing.assert_close(found, step["buffers beside"][name])


def test_ranks_of_a_unit_make_as_many_passes(outcome: Outcome) -> None:
    mesh, world = outcome.size.mesh, outcome.size.world
    for number, micro_batches in enumerate((12, 5, 1)):
        passes = [rank["steps"][number]["passes"] for rank in outcome.ranks]
        by_unit = [{passes[r] for r in mesh.list_unit(u)} for u in range(world // mesh.unit)]
        assert all(len(own) == 1 for own in by_unit), passes
        assert passes[0] == -(-micro_batches // mesh.count_shares(world))


def test_every_connection_is_there_to_be_cut_once_the_group_is_formed(outcome: Outcome) -> None:
    mesh, world = outcome.size.mesh, outcome.size.world
    sums = [world, world // mesh.unit, *([world // mesh.tensor] if mesh.tensor > 1 else [])]
    inside = [mesh.unit, mesh.shard, mesh.tensor]
    for rank in outcome.ranks:
        assert rank["sockets"] == tuple(sum(n - 1 for n in own) for own in (sums, inside))


def test_an_evaluation_counts_each_sample_once(outcome: Outcome) -> None:
    totals = [rank["evaluated"] for rank in outcome.ranks]
    assert all(own == totals[0] for own in totals)
    assert totals[0][1] == len(a_dataset())


# --- losses --------------------------------------------------------------------------------------


def die_in(place: str) -> Callable[[Job], None]:
    """Rank 3 dies in step 2. If the place is "apply", the others wait until they are cut."""

    def main(job: Job) -> None:
        model = build()
        divide(model, job.mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        job.track(model=model, optimizer=optimizer)
        data = job.batches(a_dataset(), global_batch=24, micro_batch=2)
        for step in job.steps(until=9):
            doomed = step.number == 2 and job.rank == 3
            if doomed and place == "backward":
                model["divided"].down.register_full_backward_hook(die)
            compute(step, model, data)
            if doomed:
                die()
            if step.number == 2 and place == "apply":
                wait_cut(job)
            torch.nn.utils.clip_grad_norm_(model["divided"].parameters(), 1.0)
            optimizer.step()

    return main


def die(*unused: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def wait_cut(job: Job) -> None:
    assert job._session.agent.cut.wait(60)


@pytest.mark.parametrize(
    ("mesh", "place", "step"),
    [
        (Mesh(shard=2), "backward", 1),
        (Mesh(shard=2), "apply", 2),
        pytest.param(Mesh(shard=4), "backward", 1, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_all_ranks_come_out_and_a_unit_that_is_whole_parks_at_one_step(
    tmp_path: Path, mesh: Mesh, place: str, step: int
) -> None:
    main = die_in(place)
    with agent(tmp_path, lambda: run(main, seed=4), 4, mesh=mesh) as ours:
        ours.wait_ended([3])
        for one in ours.living:
            one.send(wire.Cut(epoch=1))
        ours.wait_for(
            lambda w: bool(w.of(wire.Parked)), [0, 1, 2]
        )  # no rank waits for its limit of a day
        parked = [w.of(wire.Parked)[0] for w in ours.workers[:2]]
        assert [(p.step, p.sound) for p in parked] == [(step, True)] * 2, ours.output()


# --- without processes ---------------------------------------------------------------------------


def a_member(rank: int, mesh: Mesh, world: int = 4) -> Membership:
    start = wire.Start(
        epoch=1, rank=rank, world=world, mesh=mesh, local_rank=0, local_world=1, node_rank=0,
        job="j", run="r", staging="",
    )  # fmt: skip
    return Membership(start, LocalGroup())


@pytest.mark.parametrize(
    ("mesh", "micro_batches", "shares", "fillers"),
    [
        (Mesh(), 5, [[0, 1], [2], [3], [4]], [[], [], [], []]),
        (Mesh(shard=2), 5, [[0, 1], [2], [3], [4]], [[], [2], [], []]),
        (Mesh(shard=4), 6, [[0, 1], [2, 3], [4], [5]], [[], [], [4], [5]]),
        (Mesh(shard=2), 1, [[0], [], [], []], [[], [0], [], []]),
        (Mesh(tensor=2), 5, [[0, 1, 2], [0, 1, 2], [3, 4], [3, 4]], [[], [], [], []]),
        (Mesh(shard=2, tensor=2), 3, [[0, 1], [0, 1], [2], [2]], [[], [], [2], [2]]),
    ],
    ids=str,
)
def test_a_unit_fills_up_what_its_ranks_have_less(
    mesh: Mesh, micro_batches: int, shares: list[list[int]], fillers: list[list[int]]
) -> None:
    members = [a_member(rank, mesh) for rank in range(4)]
    assert [list(m.plan(micro_batches)) for m in members] == shares
    planned = [m.plan_passes(micro_batches) for m in members]
    assert [[p.index for p in passes if not p.filler] for passes in planned] == shares
    assert [[p.index for p in passes if p.filler] for passes in planned] == fillers


@pytest.fixture
def no_group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("no_group")
class TestAloneOnAMesh:
    def test_a_job_of_one_rank_has_a_mesh_of_one(self, a_trial: Callable[..., Trial]) -> None:
        trial = a_trial()
        mesh = trial.job.mesh
        assert (mesh.mesh_dim_names, tuple(mesh.shape)) == (("shard", "tensor"), (1, 1))
        assert trial.job.mesh is mesh

    def test_a_parameter_on_another_mesh_is_refused_by_name(
        self, a_trial: Callable[..., Trial]
    ) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        trial = a_trial()
        mesh = trial.job.mesh
        fully_shard(trial.model, mesh=init_device_mesh("cpu", (1,), mesh_dim_names=("shard",)))
        named = {"model.weight": trial.model.weight}
        with pytest.raises(
            Misuse, match=r"model\.weight is a DTensor on a mesh that is not job\.mesh"
        ):
            spread.require_known(named, mesh, exact=False)

    def test_a_parameter_that_nothing_sums_over_the_shards_is_refused(
        self, a_trial: Callable[..., Trial]
    ) -> None:
        from torch.distributed.tensor import Replicate, distribute_tensor

        mesh = a_trial().job.mesh
        copied = distribute_tensor(torch.ones(4), mesh["shard"], [Replicate()])
        with pytest.raises(Misuse, match="over the dimension shard, so nothing sums"):
            spread.require_known({"w": copied}, mesh, exact=False)

    def test_how_a_parameter_lies_decides_who_sums_it(self, a_trial: Callable[..., Trial]) -> None:
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        mesh = a_trial().job.mesh
        cases = [
            (mesh["shard"], [Shard(0)], "shard", Over.REPLICAS),
            (mesh["tensor"], [Shard(1)], "tensor", Over.SHARERS),
            (mesh["tensor"], [Replicate()], "whole", Over.SHARERS),
            (mesh, [Shard(0), Shard(1)], "both", Over.REPLICAS),
            (mesh, [Shard(0), Replicate()], "shard", Over.REPLICAS),
        ]
        for own, placements, place, over in cases:
            found = spread.find_spread(distribute_tensor(torch.ones(4, 4), own, placements))
            assert (found.place, found.over) == (place, over), placements
        assert spread.find_spread(nn.Parameter(torch.ones(2))) == spread.PLAIN


def test_skip_is_refused_where_ranks_compute_together(a_trial: Callable[..., Trial]) -> None:
    trial = a_trial(mesh=Mesh(shard=1, tensor=2), world=2).track()
    step = next(trial.job.steps(until=2))
    for _ in step.batches(trial.data):
        with pytest.raises(Misuse, match=r"step\.backward\(loss, weight=0\)"):
            step.skip()
        break

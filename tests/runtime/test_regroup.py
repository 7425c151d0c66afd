"""Ranks are killed at any moment of a step. The others continue the step, and the sums stay exact."""

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from everstep import Job, run
from everstep.mesh import Listener
from everstep_contract import wire
from everstep_contract.position import Phase
from runtime.an_agent import LAST_STEP, Agent, agent
from runtime.killed_ranks import STEPS, a_script, assert_exact, entries, states

WORLD = 4


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[wire.Applied]:
    folder = tmp_path_factory.mktemp("undisturbed")
    with agent(folder, lambda: run(a_script(), seed=4), WORLD) as ours:
        ours.finish()
        return entries(ours, 0)


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 6))]
)
def test_ranks_killed_at_random_moments_cost_nothing(
    tmp_path: Path, undisturbed: list[wire.Applied], seed: int
) -> None:
    chance = random.Random(seed)
    with agent(tmp_path, lambda: run(a_script(), seed=4), WORLD) as ours:
        for number in range(WORLD - 1):
            living = [w.rank for w in ours.living]
            ours.wait_applied(2 + 3 * number, living)
            time.sleep(chance.random() * 0.03)
            ours.kill(chance.choice(living))
            ours.regroup()
        survivors = [w.rank for w in ours.living]
        ours.finish()
        assert_exact(ours, undisturbed, survivors)


def save_held(ours: Agent) -> None:
    """Let each survivor that is in its loop save what it holds. All must hold the same."""
    epoch, told = ours.epoch, {w.rank: w.of(wire.Standing)[-1] for w in ours.living}
    furthest = max(s.applied for s in told.values())
    inside = [r for r, s in told.items() if s.share is not None and s.applied == furthest]
    for rank in inside:
        ours.workers[rank].send(wire.SaveHeld(epoch=epoch, step=furthest))
    ours.wait_for(lambda w: any(f.whole and f.epoch == epoch for f in w.of(wire.Staged)), inside)
    staged = [ours.workers[r].of(wire.Staged)[-1] for r in inside]
    assert {(f.step, f.problem) for f in staged} <= {(furthest, "")}
    assert len({Path(f.path).read_bytes() for f in staged}) <= 1


def test_with_exact_reduction_the_bits_do_not_depend_on_how_many_ranks_are_left(
    tmp_path: Path,
) -> None:
    main = a_script()
    found = []
    for world in (1, 3):
        folder = tmp_path / str(world)
        folder.mkdir()
        with agent(folder, lambda: run(main, seed=4, exact_reduction=True), world) as ours:
            ours.finish()
            found.append(states(ours))
    folder = tmp_path / "disturbed"
    folder.mkdir()
    with agent(folder, lambda: run(main, seed=4, exact_reduction=True), WORLD) as ours:
        for number, victim in enumerate((3, 1)):
            ours.wait_applied(2 + 4 * number, [w.rank for w in ours.living])
            ours.kill(ours.living[min(victim, len(ours.living) - 1)].rank)
            ours.regroup(lambda: save_held(ours))
        ours.finish()
        found.append(states(ours))
    assert len(found[0]) == STEPS
    assert found[0] == found[1] == found[2]


def test_the_script_sees_its_new_rank_world_size_and_epoch(tmp_path: Path) -> None:
    with agent(tmp_path, lambda: run(a_script(), seed=4), 3) as ours:
        ours.wait_applied(3, [0, 1, 2])
        ours.kill(1)
        ours.regroup()
        ours.finish()
        lines = set(ours.output().splitlines())
        assert {f"step 1: rank {r} of 3 in 1" for r in range(3)} <= lines
        assert {f"step {STEPS}: rank {r} of 2 in 2" for r in range(2)} <= lines


def test_a_rank_that_is_in_a_pause_when_another_is_lost_pauses_on(
    tmp_path: Path, undisturbed: list[wire.Applied]
) -> None:
    may_go = tmp_path / "may-go"

    def pause(job: Job, step: int) -> None:
        if job.rank == 0 and step == 3:
            with job.pause("an export", limit=60):
                print("pauses", flush=True)
                while not may_go.exists():
                    time.sleep(0.002)

    with agent(tmp_path, lambda: run(a_script(after=pause), seed=4), WORLD) as ours:
        ours.wait_applied(3, [0])
        ours.kill(2)
        ours.regroup()
        may_go.touch()
        ours.finish()
        assert_exact(ours, undisturbed, [0, 1, 3])
        assert ours.output().count("pauses") == 1


def test_a_loss_at_the_boundary_at_which_newcomers_join(
    tmp_path: Path, undisturbed: list[wire.Applied]
) -> None:
    """The others go on in the next epoch before they have begun to hold for the newcomers."""

    def before(job: Job) -> None:
        session, membership = job._session, job._session.membership
        take = session.take_snapshot

        def slowly() -> object:
            if session.applied == 4 and membership.epoch == 1:
                if job.rank == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                with membership._news:
                    membership._news.wait_for(lambda: membership.epoch > 1)
            return take()

        session.take_snapshot = slowly  # type: ignore[method-assign,assignment]

    def until_armed(job: Job, step: int) -> None:
        while not job._session.meter.armed:
            time.sleep(0.001)

    with agent(tmp_path, lambda: run(a_script(before, until_armed), seed=4), WORLD) as ours:
        ours.boundary = wire.BoundaryReply(hold=True, epoch=1)
        for worker in ours.workers:
            worker.page.armed = 4
        ours.wait_ended([2])
        ours.regroup()
        ours.finish()
        assert_exact(ours, undisturbed, [0, 1, 3])


def test_a_loss_after_the_last_step_has_it_saved_again(
    tmp_path: Path, undisturbed: list[wire.Applied]
) -> None:
    """What was staged in the former epoch is dropped, and no later step follows that could be saved instead."""
    with agent(tmp_path, lambda: run(a_script(), seed=4), 3) as ours:
        ours.boundary = wire.BoundaryReply(hold=True, epoch=1)
        for worker in ours.workers:
            worker.page.armed = STEPS
        (tmp_path / LAST_STEP).touch()
        ours.wait_for(lambda w: bool(w.of(wire.Standing)))
        ours.kill(2)
        ours.regroup()
        ours.finish()
        assert_exact(ours, undisturbed, [0, 1])
        for rank in (0, 1):
            staged = [(f.epoch, f.step) for f in ours.workers[rank].of(wire.Staged)]
            assert staged == [(1, STEPS), (2, STEPS)]


@pytest.mark.usefixtures("either_way")
def test_two_deaths_at_once(tmp_path: Path, undisturbed: list[wire.Applied]) -> None:
    with agent(tmp_path, lambda: run(a_script(), seed=4), WORLD) as ours:
        ours.wait_applied(3, [0, 1, 2, 3])
        for rank in (0, 2):
            os.kill(ours.workers[rank].pid, signal.SIGKILL)
        ours.wait_ended([0, 2])
        ours.regroup()
        ours.finish()
        assert_exact(ours, undisturbed, [1, 3])


@pytest.mark.usefixtures("either_way")
def test_a_death_while_the_others_regroup(tmp_path: Path, undisturbed: list[wire.Applied]) -> None:
    with agent(tmp_path, lambda: run(a_script(), seed=4), WORLD) as ours:
        ours.wait_applied(3, [0, 1, 2, 3])
        ours.kill(3)
        ours.regroup(before_start=lambda: ours.kill(1))
        ours.regroup()
        ours.finish()
        assert_exact(ours, undisturbed, [0, 2])


def test_a_death_before_the_others_are_connected(
    tmp_path: Path, undisturbed: list[wire.Applied]
) -> None:
    """The others must not wait for the limit, because the agent has told them to leave the epoch."""

    def before(job: Job) -> None:
        connect, rank = Listener.connect, job.rank

        def or_die(
            listener: Listener, number: int, entries: list[str], _: float, *look: Any
        ) -> Any:
            if rank == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return connect(listener, number, entries, 1000.0, *look)

        Listener.connect = or_die  # type: ignore[method-assign,assignment]

    with agent(tmp_path, lambda: run(a_script(before), seed=4), WORLD) as ours:
        ours.wait_applied(3, [0, 1, 2, 3])
        ours.kill(3)
        ours.regroup()
        ours.wait_ended([2])
        ours.regroup()
        ours.finish()
        assert_exact(ours, undisturbed, [0, 1])


@pytest.fixture(scope="module")
def undisturbed_exact(tmp_path_factory: pytest.TempPathFactory) -> set[tuple[str, ...]]:
    folder = tmp_path_factory.mktemp("undisturbed-exact")
    with agent(folder, lambda: run(a_script(), seed=4, exact_reduction=True), 1) as ours:
        ours.finish()
        return states(ours)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 25))]
)
def test_ranks_killed_between_the_sums_of_buckets_change_no_bit(
    tmp_path: Path, undisturbed_exact: set[tuple[str, ...]], seed: int
) -> None:
    """Each rank launches its buckets at moments of its own, so others have more of them complete."""

    def before(job: Job) -> None:
        launch, chance = job._session.reducer._launch, random.Random(f"{seed}-{job.rank}")

        def late(bucket: Any) -> None:
            time.sleep(chance.random() * 0.01)
            launch(bucket)

        job._session.reducer._launch = late  # type: ignore[method-assign]

    chance, kept = random.Random(seed), []
    main = a_script(before)
    with agent(tmp_path, lambda: run(main, seed=4, exact_reduction=True), WORLD) as ours:
        for number in range(WORLD - 1):
            living = [w.rank for w in ours.living]
            ours.wait_applied(2 + 3 * number, living)
            time.sleep(chance.random() * 0.06)
            ours.kill(chance.choice(living))
            kept.append(ours.regroup().complete_buckets)
        ours.finish()
        print(f"complete buckets at each loss: {kept}")
        assert states(ours) == undisturbed_exact


@pytest.mark.parametrize("exact", [False, True], ids=["float", "exact"])
def test_a_bucket_that_is_complete_on_all_survivors_is_not_summed_again(
    tmp_path: Path, exact: bool
) -> None:
    """The victim does not launch bucket 2 of step 6. The buckets before it hold its gradients."""

    def before(job: Job) -> None:
        reducer, rank = job._session.reducer, job.rank
        launch = reducer._launch

        def or_wait(bucket: Any) -> None:
            step, number = job._session.applied + 1, reducer._plan.buckets.index(bucket)
            if (step, number, rank) == (6, 2, 2):
                threading.Event().wait()
            if step == 6:
                print(f"launched {number} in {job._session.membership.epoch}", flush=True)
            launch(bucket)

        reducer._launch = or_wait  # type: ignore[method-assign]

    def train(folder: Path, script: Callable[[Job], None], world: int) -> Agent:
        folder.mkdir()
        with agent(folder, lambda: run(script, seed=4, exact_reduction=exact), world) as ours:
            if world == 3:
                for rank in (0, 1):
                    ours.wait_complete_buckets(rank, step=6, count=2)
                ours.kill(2)
                assert ours.regroup().complete_buckets == 2
            ours.finish()
            return ours

    alone = train(tmp_path / "alone", a_script(), 1)
    disturbed = train(tmp_path / "disturbed", a_script(before), 3)
    launched = {
        epoch: {n for n in range(99) if f"launched {n} in {epoch}\n" in disturbed.output()}
        for epoch in (1, 2)
    }
    assert launched[1] == {0, 1} | launched[2]
    assert launched[2] == {*range(2, len(launched[1]))} != set()
    assert_exact(disturbed, entries(alone, 0), [0, 1])
    if exact:
        assert states(disturbed) == states(alone)


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_vector_that_one_survivor_holds_is_handed_to_the_others(
    tmp_path: Path, undisturbed: list[wire.Applied], ahead: int
) -> None:
    """The victim dies with the sums complete. Only one survivor has the vector."""

    def before(job: Job) -> None:
        membership, rank = job._session.membership, job.rank
        complete = membership.complete

        def slowly(group: object, numbers: object) -> bool:
            if job._session.applied == 5 and membership.epoch == 1 and rank != ahead:
                if rank == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                with membership._news:
                    membership._news.wait_for(lambda: membership._held or membership.epoch > 1)
            return complete(group, numbers)  # type: ignore[arg-type]

        membership.complete = slowly  # type: ignore[method-assign]

    with agent(tmp_path, lambda: run(a_script(before), seed=4), 3) as ours:
        ours.wait_ended([2])
        ours.wait_applied(6, [ahead])
        plan = ours.regroup()
        assert plan.behind == {1 - ahead}
        ours.finish()
        assert_exact(ours, undisturbed, [0, 1])
        assert [a.epoch for a in entries(ours, 0)] == [a.epoch for a in entries(ours, 1)]


def test_a_rank_that_may_not_regroup_parks_at_the_boundary_before(tmp_path: Path) -> None:
    with agent(tmp_path, lambda: run(a_script(), seed=4), 3) as ours:
        ours.wait_applied(3, [0, 1, 2])
        ours.kill(2)
        for worker in ours.living:
            worker.send(wire.Cut(epoch=1, keep=True))
        ours.wait_for(lambda w: bool(w.of(wire.Standing)), [0, 1])
        for worker in ours.living:
            worker.send(wire.Cut(epoch=1))
        ours.wait_for(lambda w: bool(w.of(wire.Parked)), [0, 1])
        assert all(w.of(wire.Parked)[0].sound for w in ours.living)
        assert all(w.position.phase is not Phase.REDUCED for w in ours.living)

"""Real processes with real gloo: several ranks compute what one rank computes."""

import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from everstep import Job, run
from everstep_contract import env, wire
from everstep_contract.position import PositionPage
from runtime.an_agent import agent

STEPS = 6


def a_model() -> nn.Module:
    """A model in which one parameter is larger than several of this test's buckets, one parameter
    is never used, and one layer has buffers.
    """
    model = nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.Dropout(0.2), nn.Linear(32, 2))
    model.register_parameter("idle", nn.Parameter(torch.zeros(3)))
    return model


def a_dataset(size: int = 50) -> torch.utils.data.TensorDataset:
    inputs = torch.randn(size, 6, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(inputs, (inputs.sum(1) > 0).long())


def train(job: Job, global_batch: int, micro_batch: int) -> None:
    model = a_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    job.track(model=model, optimizer=optimizer)
    job._session.reducer._bucket_bytes = 256
    data = job.batches(a_dataset(), global_batch=global_batch, micro_batch=micro_batch)
    for step in job.steps(until=STEPS):
        for inputs, wanted in step.batches(data):
            step.backward(nn.functional.cross_entropy(model(inputs), wanted))
        optimizer.step()
    print("sum", job.rank, job.sum(job.rank + 1))


def applied(folder: Path, world: int, main: Callable[[Job], None]) -> list[list[wire.Applied]]:
    """Run `main` to its end; return all `Applied` frames by rank."""
    folder.mkdir()
    with agent(folder, lambda: run(main, seed=4), world) as ours:
        ours.finish()
        assert [w.status for w in ours.workers] == [0] * world, ours.output()
        return [w.of(wire.Applied) for w in ours.workers]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_any_number_of_ranks_takes_the_same_steps(tmp_path: Path, world: int) -> None:
    def main(job: Job) -> None:
        train(job, 14, 2)

    (alone,) = applied(tmp_path / "alone", 1, main)
    together = applied(tmp_path / "together", world, main)
    for rank in together[1:]:
        assert [a.entries for a in rank] == [a.entries for a in together[0]]
        assert [a.grad_norm for a in rank] == [a.grad_norm for a in together[0]]
    for one, many in zip(alone, together[0], strict=True):
        assert many.entries[0].samples == one.entries[0].samples
        assert set(many.entries[0].counts) == {1}
        assert many.loss == pytest.approx(one.loss, abs=1e-4)


def test_ranks_without_micro_batches_take_part(tmp_path: Path) -> None:
    ranks = applied(tmp_path / "few", 4, lambda job: train(job, 4, 2))
    assert len({str([a.loss for a in rank]) for rank in ranks}) == 1


def test_two_runs_at_one_size_are_equal_to_the_last_bit(tmp_path: Path) -> None:
    first, second = (applied(tmp_path / n, 3, lambda job: train(job, 14, 2)) for n in ("a", "b"))
    assert [a.entries for a in first[0]] == [a.entries for a in second[0]]


def test_run_takes_a_seed_of_numpy(tmp_path: Path) -> None:
    """A save holds it as JSON."""

    def main(job: Job) -> None:
        train(job, 14, 2)

    given: dict[str, Any] = {"seed": np.int64(4), "exact_reduction": np.bool_(True)}
    with agent(tmp_path, lambda: run(main, **given), 1) as ours:
        ours.finish()
        assert ours.workers[0].status == 0, ours.output()
        assert [staged.step for staged in ours.workers[0].of(wire.Staged)] == [STEPS]


def test_ranks_that_draw_from_different_feeds_apply_nothing(tmp_path: Path) -> None:
    """The sum would have samples of both, and each feed would lose some."""

    def main(job: Job) -> None:
        model = a_model()
        job.track(model=model)
        feeds = [job.batches(a_dataset(n), global_batch=8, micro_batch=2) for n in (50, 40)]
        for step in job.steps(until=4):
            for inputs, wanted in step.batches(feeds[job.rank if step.number == 3 else 1]):
                step.backward(nn.functional.cross_entropy(model(inputs), wanted))

    with agent(tmp_path, lambda: run(main), 2) as ours:
        ours.wait_for(lambda w: bool(w.of(wire.Failed) or w.of(wire.Finished)))
        for worker in ours.workers:
            assert [a.step for a in worker.of(wire.Applied)] == [1, 2]
            (failed,) = worker.of(wire.Failed)
            assert failed.cause == "Misuse", failed.message
            assert "step 3: this rank drew from feed" in failed.message


def test_a_save_that_some_ranks_only_ask_for(tmp_path: Path) -> None:
    """It could never be complete, so all ranks save the next step."""

    def main(job: Job) -> None:
        model = a_model()
        job.track(model=model)
        data = job.batches(a_dataset(), global_batch=8, micro_batch=2)
        for step in job.steps(until=8):
            if step.number == 2 or (step.number == 5 and job.is_first):
                job.save()
            for inputs, wanted in step.batches(data):
                step.backward(nn.functional.cross_entropy(model(inputs), wanted))

    with agent(tmp_path, lambda: run(main), 2) as ours:
        ours.finish()
        for worker in ours.workers:
            noted = {a.step: note for a in worker.of(wire.Applied) for note in a.notes}
            assert list(noted) == [6]
            assert noted[6].startswith("step 5: job.save was called on some ranks only")
        saved = [[s.step for s in w.of(wire.Staged)] for w in ours.workers]
        assert saved == [[2, 5, 6, 8], [2, 6, 8]]


class Counted(nn.Module):
    """Counts its calls in a buffer that float64 cannot hold exactly; `forward` reads the buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.tensor(2**60 + 1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return inputs * (1 + (self.calls % 7) / 7)


def test_buffers_follow_micro_batch_0_whatever_the_number_of_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "buffers"
    folder.mkdir()

    def main(job: Job) -> None:
        torch.manual_seed(5)
        model = nn.Sequential(Counted(), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 2))
        # lr=0.0: sums in another order would change the parameters, and with them the statistics.
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        job.track(model=model, optimizer=optimizer)
        data = job.batches(a_dataset(), global_batch=14, micro_batch=2)
        for step in job.steps(until=STEPS):
            for inputs, wanted in step.batches(data):
                step.backward(nn.functional.cross_entropy(model(inputs), wanted))
            optimizer.step()
        torch.save(model.state_dict(), folder / f"{job.world_size}-{job.rank}.pt")

    for world in (1, 3):
        applied(tmp_path / f"run-{world}", world, main)
    alone: dict[str, Any] = torch.load(folder / "1-0.pt")
    assert alone["0.calls"] == 2**60 + 1 + STEPS, "the buffer must count one call per step"
    for rank in range(3):
        found = torch.load(folder / f"3-{rank}.pt")
        assert all(torch.equal(value, found[name]) for name, value in alone.items()), rank


@pytest.mark.parametrize("exact", [False, True], ids=["", "exact reduction"])
def test_a_scaler_decides_the_same_on_a_rank_without_micro_batches(
    tmp_path: Path, exact: bool
) -> None:
    def main(job: Job) -> None:
        model = nn.Linear(6, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=2)
        job.track(model=model, optimizer=optimizer, scaler=scaler)
        data = job.batches(a_dataset(), global_batch=2, micro_batch=1)
        for step in job.steps(until=5):
            for inputs, wanted in step.batches(data):
                loss = nn.functional.cross_entropy(model(inputs), wanted)
                # a gradient overflows on rank 0 only
                spoil = float("inf") if step.number == 3 and job.rank == 0 else 1.0
                model.weight.register_hook(lambda g, s=spoil: g * s) if spoil != 1 else None
                step.backward(loss, scaler=scaler)
            scaler.step(optimizer)
            scaler.update()
        print("scale", job.rank, scaler.get_scale(), model.weight.sum().item())

    folder = tmp_path / "scaler"
    folder.mkdir()
    with agent(folder, lambda: run(main, seed=4, exact_reduction=exact), 3) as ours:
        ours.finish()
        lines = [
            line.split()[2:] for line in ours.output().splitlines() if line.startswith("scale")
        ]
        assert len(lines) == 3, ours.output()
        assert lines[0] == lines[1] == lines[2]


def test_a_script_that_raises_says_so_before_the_worker_ends(tmp_path: Path) -> None:
    def main(job: Job) -> None:
        raise ValueError("no such corpus")

    with agent(tmp_path, lambda: run(main), 1) as ours:
        assert ours.wait_ended() == [1]
        (failed,) = ours.workers[0].of(wire.Failed)
        assert failed.cause == "ScriptError"
        assert re.fullmatch(r"ValueError: no such corpus \(test_ranks\.py:\d+\)", failed.message)
        assert "raise ValueError" in failed.traceback
        assert "worker.py" not in failed.traceback
        assert "no such corpus" in ours.output()


def test_a_wrapper_that_sums_gradients_beside_everstep_is_refused(tmp_path: Path) -> None:
    """Ranks with different numbers of micro-batches would sum different things with each other."""

    def main(job: Job) -> None:
        model = nn.Linear(1, 1)
        computes = nn.parallel.DistributedDataParallel(model)
        job.track(model=model)
        data = job.batches([torch.ones(1)], global_batch=3, micro_batch=1)
        for step in job.steps(until=2):
            for batch in step.batches(data):
                step.backward(computes(batch).mean())

    with agent(tmp_path, lambda: run(main), 2) as ours:
        assert ours.wait_ended() == [1, 1]
        for worker in ours.workers:
            (failed,) = worker.of(wire.Failed)
            assert failed.cause == "Misuse"
            assert failed.message.startswith(
                "DistributedDataParallel sums the gradients of all ranks"
            )


@pytest.mark.parametrize("how", ["break", "sys.exit"])
def test_a_main_that_returns_early_is_an_error(tmp_path: Path, how: str) -> None:
    def main(job: Job) -> None:
        model = nn.Linear(1, 1)
        job.track(model=model)
        for _ in job.steps(until=9):
            if how == "break":
                break
            sys.exit()

    with agent(tmp_path, lambda: run(main), 1) as ours:
        ours.wait_ended()
        (failed,) = ours.workers[0].of(wire.Failed)
        assert failed.cause == "Misuse"
        assert "main returned after step 0, before until=9" in failed.message


@pytest.mark.parametrize(("status", "causes"), [(0, []), (3, ["UserError"])])
def test_a_main_that_exits_after_the_steps_has_returned_if_its_status_is_0(
    tmp_path: Path, status: int, causes: list[str]
) -> None:
    def main(job: Job) -> None:
        train(job, 14, 2)
        sys.exit(status)

    with agent(tmp_path, lambda: run(main), 1) as ours:
        if not causes:
            ours.finish()
        ours.wait_ended()
        assert [failed.cause for failed in ours.workers[0].of(wire.Failed)] == causes


def test_survivors_of_a_kill_come_out_by_themselves(tmp_path: Path) -> None:
    """No agent tells them. The first rank with an error cuts, and its neighbors follow."""

    def main(job: Job) -> None:
        die_in_step_3(job)

    with agent(tmp_path, lambda: run(main), 4) as ours:
        ours.wait_ended([2])
        ours.wait_for(lambda w: bool(w.of(wire.Standing)), [0, 1, 3])
        for rank in (0, 1, 3):
            ours.workers[rank].send(wire.Cut(epoch=1))
        ours.wait_for(lambda w: bool(w.of(wire.Parked)), [0, 1, 3])
        parked = [ours.workers[r].of(wire.Parked)[0] for r in (0, 1, 3)]
        assert [(p.step, p.sound) for p in parked] == [(2, True)] * 3


def test_a_child_of_the_dead_rank_does_not_keep_the_others_blind(tmp_path: Path) -> None:
    """A forked data loader inherits every descriptor; it must not keep the group's sockets open."""
    children = tmp_path / "child"

    def main(job: Job) -> None:
        if job.rank == 1:
            pid = os.fork()
            if pid == 0:
                signal.pause()
            children.write_text(str(pid))
        die_in_step_3(job, rank=1)

    with agent(tmp_path, lambda: run(main), 2) as ours:
        try:
            ours.wait_for(lambda w: bool(w.of(wire.Standing)), [0])
        finally:
            os.kill(int(children.read_text()), signal.SIGKILL)


@pytest.mark.parametrize("how", ["sys.exit", "an exception", "a return"])
def test_a_child_that_the_script_forks_may_end_in_any_way(tmp_path: Path, how: str) -> None:
    """The rank waits for it, so it must end. It must end neither the job nor the rank's pause."""
    statuses = {"sys.exit": 5, "an exception": 1, "a return": 0}

    def main(job: Job) -> None:
        model = nn.Linear(6, 2)
        job.track(model=model)
        data = job.batches(a_dataset(), global_batch=8, micro_batch=2)
        for step in job.steps(until=3):
            for inputs, wanted in step.batches(data):
                step.backward(nn.functional.cross_entropy(model(inputs), wanted))
            with job.pause("export"):
                pid = os.fork()
                if pid == 0:
                    if how == "a return":
                        return
                    raise SystemExit(5) if how == "sys.exit" else ZeroDivisionError
                print("child", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                print("scope", PositionPage(os.environ[env.POSITION_FILE]).read().scope.name)

    with agent(tmp_path, lambda: run(main), 2) as ours:
        ours.finish()
        ended = [line for line in ours.output().splitlines() if line.startswith("child")]
        assert ended == [f"child {statuses[how]}"] * 6, ours.output()
        assert ours.output().count("scope PAUSE") == 6
        assert [w.status for w in ours.workers] == [0, 0]
        assert not [f for w in ours.workers for f in w.of(wire.Failed)]


def test_a_cut_during_start_up_is_answered_although_the_script_is_busy(tmp_path: Path) -> None:
    def main(job: Job) -> None:
        print("busy")
        signal.pause()

    with agent(tmp_path, lambda: run(main), 2) as ours:
        ours.until_printed("busy", 2)
        for worker in ours.workers:
            worker.send(wire.Cut(epoch=1))
        ours.wait_for(lambda w: bool(w.of(wire.Parked)))
        assert all(not w.of(wire.Parked)[0].sound for w in ours.workers)
        for worker in ours.workers:
            worker.send(wire.Exit())
        assert ours.wait_ended() == [0, 0]


def die_in_step_3(job: Job, rank: int = 2) -> None:
    model = nn.Linear(6, 2)
    job.track(model=model)
    data = job.batches(a_dataset(), global_batch=8, micro_batch=2)
    for step in job.steps(until=9):
        for inputs, wanted in step.batches(data):
            if step.number == 3 and job.rank == rank:
                os.kill(os.getpid(), signal.SIGKILL)
            step.backward(nn.functional.cross_entropy(model(inputs), wanted))

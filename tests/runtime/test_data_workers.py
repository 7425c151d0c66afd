"""Data workers of a job of one rank, in real processes."""

import multiprocessing
import os
import resource
import select
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    TensorDataset,
    WeightedRandomSampler,
)

from everstep import data_workers as data_workers_module
from everstep.data_workers import DataWorkers, describe_exit
from everstep.errors import Misuse
from everstep.fetching import Request, Source
from runtime import fed_datasets
from runtime.a_job import Trial
from runtime.an_agent import LIMIT
from runtime.fed_datasets import Augmented, wait_ready

UNTIL = 5
TRIES = 10
MakeTrial = Callable[..., Trial]


@pytest.fixture(autouse=True, scope="module")
def _ends_the_server() -> Iterator[None]:
    """End the fork server. Ranks that later tests fork from this process could not use it."""
    yield
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


def a_feed(trial: Trial, dataset: Any, workers: int, **settings: Any) -> Any:
    made = {"global_batch": 12, "micro_batch": 2, "name": "fed", "workers": workers} | settings
    return trial.job.batches(dataset, **made)


def take_steps(
    trial: Trial, data: Any, loops: int = 1, after: Callable[[int], None] = lambda step: None
) -> list[Any]:
    """Train to the end; return each batch, and a random number that forward would draw."""
    seen: list[Any] = []
    for step in trial.job.steps(until=UNTIL):
        for _ in range(loops):
            for batch in step.batches(data):
                seen.append((batch, torch.rand(1)))
                step.backward(trial.model(torch.ones(1, 3)).sum())
            trial.optimizer.step()
        after(step.number)
    return seen


def assert_equal(found: list[Any], wanted: list[Any]) -> None:
    assert len(found) == len(wanted)
    for (batch, drawn), (its, same) in zip(found, wanted, strict=True):
        assert torch.equal(drawn, same)
        assert torch.equal(batch, its)


def notes(trial: Trial) -> str:
    return "\n".join(text for f in trial.agent.frames for text in getattr(f, "own_notes", ()))


def wait_ended(process: int) -> None:
    """Wait for the end of the process of this pidfd, then close the pidfd."""
    try:
        assert select.select([process], [], [], LIMIT)[0], "the process still runs"
    finally:
        os.close(process)


def kill(pid: int) -> None:
    process = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    wait_ended(process)


@pytest.fixture
def undisturbed(a_trial: MakeTrial) -> list[Any]:
    trial = a_trial().track()
    return take_steps(trial, a_feed(trial, Augmented(), 0))


def test_batches_and_random_numbers_are_those_of_a_feed_without_data_workers(
    a_trial: MakeTrial, undisturbed: list[Any]
) -> None:
    trial, dataset = a_trial().track(), Augmented()
    data = a_feed(trial, dataset, 2)
    wait_ready(data)
    assert_equal(take_steps(trial, data), undisturbed)
    assert dataset.fetched == 0, "the rank must leave all fetching to the data workers"
    data._workers.close()


def test_several_loops_of_a_step_see_the_same_batches_fetched_ahead(
    a_trial: MakeTrial,
) -> None:
    trial, dataset = a_trial().track(), Augmented()
    data = a_feed(trial, dataset, 2)
    wait_ready(data)
    alone = a_trial().track()
    assert_equal(
        take_steps(trial, data, loops=2), take_steps(alone, a_feed(alone, Augmented(), 0), loops=2)
    )
    assert dataset.fetched <= 12, (
        "the rank may fetch only the first step's second loop, which was not announced"
    )
    data._workers.close()


def test_an_evaluation_is_fetched_ahead_with_its_own_random_numbers(a_trial: MakeTrial) -> None:
    trial, dataset = a_trial().track(), Augmented(10)
    data, plain = a_feed(trial, dataset, 1), a_feed(trial, Augmented(10), 0, name="plain")
    wait_ready(data)
    found, wanted = [*trial.job.evaluate(data)], [*trial.job.evaluate(plain)]
    assert len(found) == 5
    assert torch.equal(torch.cat(found), torch.cat(wanted))
    assert dataset.fetched == 0
    data._workers.close()


def test_a_dataset_that_fetches_many_at_once(a_trial: MakeTrial) -> None:
    trial = a_trial().track()
    data = a_feed(trial, fed_datasets.Many(), 1)
    wait_ready(data)
    alone = a_trial().track()
    plain = take_steps(alone, a_feed(alone, fed_datasets.Many(), 0))
    for (batch, _), (its, _) in zip(take_steps(trial, data), plain, strict=True):
        assert torch.equal(batch["index"], its["index"])
        assert torch.equal(batch["value"], its["value"])
    data._workers.close()


def test_a_data_worker_that_is_killed_is_named_and_replaced(
    a_trial: MakeTrial, undisturbed: list[Any]
) -> None:
    trial = a_trial().track()
    data = a_feed(trial, Augmented(), 2)
    wait_ready(data)
    before = data._workers.pids

    def kill_one(step: int) -> None:
        if step == 2:
            os.kill(before[0], signal.SIGKILL)

    assert_equal(take_steps(trial, data, after=kill_one), undisturbed)
    assert f"rank 0: feed fed: data worker {before[0]} was killed by signal 9 (SIGKILL" in notes(
        trial
    )
    assert "another takes its place" in notes(trial)
    assert len(data._workers.pids) == 2
    assert before[0] not in data._workers.pids
    data._workers.close()


def test_a_sample_that_ends_data_workers_is_fetched_by_the_rank(
    a_trial: MakeTrial, undisturbed: list[Any]
) -> None:
    trial = a_trial().track()
    data = a_feed(trial, fed_datasets.Deadly(), 2)
    wait_ready(data)
    assert_equal(take_steps(trial, data), undisturbed)
    assert "ended while it fetched this; the rank then fetched it itself" in notes(trial)
    assert "was killed by signal 9" in notes(trial)
    data._workers.close()


def test_an_exception_of_the_dataset_is_raised_in_the_rank(a_trial: MakeTrial) -> None:
    trial = a_trial().track()
    data = a_feed(trial, fed_datasets.Broken(only_there=False), 1)
    wait_ready(data)
    with pytest.raises(RuntimeError, match="sample 5 is broken"):
        take_steps(trial, data)
    data._workers.close()


def test_an_exception_in_the_data_worker_alone_is_noted(
    a_trial: MakeTrial, undisturbed: list[Any]
) -> None:
    trial = a_trial().track()
    data = a_feed(trial, fed_datasets.Broken(only_there=True), 1)
    wait_ready(data)
    assert_equal(take_steps(trial, data), undisturbed)
    assert "could not fetch a micro-batch: RuntimeError: sample 5 is broken" in notes(trial)
    data._workers.close()


def seconds_per_step(trial: Trial, workers: int) -> float:
    """The shortest later step. It has 6 micro-batches, each with 20 ms to fetch and 20 ms to compute."""
    data = a_feed(trial, Augmented(seconds=0.01), workers)
    if workers:
        wait_ready(data)
    ends: list[float] = []
    for step in trial.job.steps(until=8):
        for _ in step.batches(data):
            time.sleep(0.02)
            step.backward(trial.model(torch.ones(1, 3)).sum())
        trial.optimizer.step()
        ends.append(time.monotonic())
    if workers:
        data._workers.close()
    return min(end - begin for begin, end in pairwise(ends[3:]))


def test_what_comes_next_is_fetched_while_the_rank_computes(
    a_trial: MakeTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = a_trial().track()
    data = a_feed(trial, Augmented(), 2)
    wait_ready(data)
    workers, by_rank = data._workers, list[Any]()
    monkeypatch.setattr(workers, "_fetch", by_rank.append)
    for step in trial.job.steps(until=3):
        for _ in step.batches(data):
            while workers._window and workers._window[0] not in workers._fetched:
                workers._receive(None)  # while the rank computes
            step.backward(trial.model(torch.ones(1, 3)).sum())
        trial.optimizer.step()
    workers.close()
    assert by_rank == [], "the rank must fetch nothing itself"


@pytest.mark.long  # a ratio of times: it needs a core for the data workers, and other tests may use them all
def test_a_slow_dataset_is_fetched_beside_the_computation(a_trial: MakeTrial) -> None:
    for _ in range(TRIES):
        alone = seconds_per_step(a_trial().track(), 0)
        beside = seconds_per_step(a_trial().track(), 2)
        print(
            f"a step takes {alone * 1000:.0f} ms without data workers, {beside * 1000:.0f} with two"
        )
        if beside < 0.75 * alone:
            return
    pytest.fail(f"data workers saved no time in {TRIES} tries")


@contextmanager
def data_workers(dataset: Any, count: int) -> Iterator[tuple[DataWorkers, list[str]]]:
    told: list[str] = []
    made = DataWorkers(Source(dataset, list), count, feed="fed", note=told.append)
    try:
        while not all(worker.ready for worker in made._workers):
            made._receive(None)
        yield made, told
    finally:
        made.close()


def a_request(index: int, step: int = 1) -> Request:
    return Request(seed=("micro-batch", 0, step, index), ids=(index,))


def test_what_is_taken_over_waits_for_no_prefetch_of_later_steps(tmp_path: Path) -> None:
    gate = tmp_path / "open"
    with data_workers(fed_datasets.Stuck(gate), 1) as (made, _):
        later = [a_request(i, step=2) for i in (1, 2)]
        made.expect(later)
        assert made._workers[0].asked[0] == later[0], "the data worker is stuck at a later step"
        made.expect([a_request(7), *later])
        assert made.has(later[0])
        assert not made.has(a_request(7)), "no limit learnt from prefetched batches applies to it"
        assert len(made.take(a_request(7))) == 1, "the rank fetches it itself"
        gate.touch()
        assert len(made.take(later[0])) == 1


def test_no_request_waits_for_a_data_worker_that_fetches(tmp_path: Path) -> None:
    """A request of very many samples does not fit into a socket."""
    gate = tmp_path / "open"
    with data_workers(fed_datasets.Stuck(gate), 1) as (made, _):
        many = [
            Request(seed=("micro-batch", 0, 1, index), ids=tuple(range(10**6, 10**6 + 10**5)))
            for index in (1, 2)
        ]
        rank = Thread(target=made.expect, args=(many,))
        rank.start()
        rank.join(LIMIT / 4)
        waits = rank.is_alive()
        gate.touch()
        rank.join()
        assert not waits


def test_a_batch_of_another_step_is_never_taken() -> None:
    with data_workers(Augmented(), 1) as (made, _):
        made.expect([a_request(0, step=9)])
        made._receive(None)
        assert [*made._fetched] == [a_request(0, step=9)]
        found = made.take(a_request(0, step=1))
        assert torch.equal(found[0], Source(Augmented(), list).fetch(a_request(0, step=1))[0])
        made.expect([a_request(3)])
        assert not made._fetched, "a batch that is no longer expected must be dropped"


def be_a_rank(connection: Connection, gate: Path) -> None:
    with data_workers(fed_datasets.Stuck(gate), 1) as (made, _):
        made.expect([a_request(0), a_request(7)])
        made.take(a_request(0))
        connection.send(made.pids[0])
        signal.pause()


def test_a_data_worker_ends_with_its_rank_in_the_middle_of_a_fetch(tmp_path: Path) -> None:
    ours, its = multiprocessing.Pipe()
    rank = multiprocessing.get_context("forkserver").Process(
        target=be_a_rank, args=(its, tmp_path / "never")
    )
    rank.start()
    assert ours.poll(LIMIT)
    process = os.pidfd_open(ours.recv())
    rank.kill()
    rank.join()
    wait_ended(process)


def test_a_data_worker_that_fetched_nothing_is_not_replaced() -> None:
    with data_workers(Augmented(), 1) as (made, told):
        kill(made.pids[0])
        assert len(made.take(a_request(0))) == 1
        assert made.pids == []
    assert "it had fetched nothing, so it is not replaced: 0 are left" in told[0]


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (
            ImportError("no module named 'there'"),
            "cannot load the dataset, as others could: Import",
        ),
        (SystemExit(1), "ended with exit status 1"),
    ],
    ids=["it cannot load the dataset", "it ends"],
)
def test_a_data_worker_that_cannot_start_again_does_not_end_the_job(
    tmp_path: Path, error: BaseException, why: str
) -> None:
    """The first one could, so the script was right."""
    edited = tmp_path / "edited"
    with data_workers(fed_datasets.Edited(edited, error), 1) as (made, told):
        made.expect([a_request(0)])
        made.take(a_request(0))
        edited.touch()
        kill(made.pids[0])
        while made.pids:
            made._receive(None)
        assert len(made.take(a_request(1))) == 1, "the rank fetches it itself"
    assert why in "\n".join(told)
    assert "it had fetched nothing, so it is not replaced: 0 are left" in told[-1]


def test_a_server_that_cannot_fork_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: int) -> None:
        raise EOFError("unexpected EOF")

    with data_workers(Augmented(), 1) as (made, told):
        made.expect([a_request(0)])
        made.take(a_request(0))
        monkeypatch.setattr(data_workers_module, "DataWorker", fail)
        kill(made.pids[0])
        made._receive(0)
        assert len(made.take(a_request(1))) == 1
    assert "another cannot be started (unexpected EOF): 0 are left" in told[0]


def test_a_data_worker_that_cannot_be_replaced_is_told() -> None:
    with data_workers(Augmented(), 1) as (made, told):
        made.expect([a_request(0)])
        made.take(a_request(0))
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        kill(made.pids[0])
        next_free = os.dup(0)
        os.close(next_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (next_free, limits[1]))
        try:
            made._receive(0)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert len(made.take(a_request(1))) == 1
    assert "another cannot be started ([Errno 24] Too many open files): 0 are left" in told[0]


def test_a_child_that_the_script_forks_does_not_end_those_of_its_parent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Process:
        ended = False

        def end(self, *, at_once: bool) -> None:
            self.ended = True

    process = Process()
    workers = DataWorkers(Source([0], list), 0, feed="1", note=print)
    workers._workers.append(process)
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: 1)
        workers.close()
    assert not process.ended
    workers.close()
    assert process.ended


def test_how_a_data_worker_ended() -> None:
    assert describe_exit(-7) == "was killed by signal 7 (SIGBUS)"
    assert describe_exit(-9) == "was killed by signal 9 (SIGKILL, out of memory?)"
    assert describe_exit(3) == "ended with exit status 3"


def test_what_cannot_be_pickled_is_refused(trial: Trial) -> None:
    with pytest.raises(Misuse, match=r"workers=1 sends the dataset.*cannot be pickled.*workers=0"):
        a_feed(trial, Augmented(), 1, collate=lambda samples: samples)


def test_a_dataset_that_a_data_worker_cannot_load_is_refused(trial: Trial) -> None:
    data = a_feed(trial, fed_datasets.Unloadable(), 1)
    with pytest.raises(Misuse, match=r"cannot load the dataset: ImportError: no module.*top level"):
        wait_ready(data)


def test_batches_that_cannot_be_sent_are_refused(trial: Trial) -> None:
    data = a_feed(trial, fed_datasets.Unsendable(), 1, collate=fed_datasets.first_of)
    wait_ready(data)
    with pytest.raises(Misuse, match=r"cannot send a batch, which cannot be pickled"):
        take_steps(trial, data)
    data._workers.close()


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(100))


def test_an_iterable_has_no_data_workers(trial: Trial) -> None:
    with pytest.raises(Misuse, match=r"workers=2 needs a dataset with __len__.*set workers=0"):
        a_feed(trial, Endless(), 2)


def test_an_iterable_is_not_shuffled_and_a_note_says_so(trial: Trial) -> None:
    a_feed(trial, Endless(), 0, shuffle=True)
    assert "Endless can only be iterated" in trial.session.findings.notes[-1]
    assert "in its own order, whatever shuffle= says" in trial.session.findings.notes[-1]


@pytest.mark.parametrize("workers", [-1, 1.5, True, "2"])
def test_workers_is_a_whole_number(trial: Trial, workers: Any) -> None:
    with pytest.raises(Misuse, match=r"job\.batches: workers=.*0 or more"):
        a_feed(trial, Augmented(), workers)


SAMPLES = TensorDataset(torch.arange(8.0))
LOADERS = {
    "shuffled": (
        DataLoader(SAMPLES, batch_size=4, shuffle=True, num_workers=2),
        r"job\.batches\(loader\.dataset, global_batch=4 \* ranks, micro_batch=4, workers=2\)$",
    ),
    "in order, own collate": (
        DataLoader(SAMPLES, batch_size=4, collate_fn=fed_datasets.first_of),
        r"micro_batch=4, shuffle=False, collate=loader\.collate_fn\)$",
    ),
    "distributed": (
        DataLoader(SAMPLES, sampler=DistributedSampler(SAMPLES, 2, 0)),
        r"ranks share the samples without a DistributedSampler$",
    ),
    "weighted": (
        DataLoader(SAMPLES, sampler=WeightedRandomSampler([1.0] * 8, 8)),
        r"The order of its WeightedRandomSampler is not kept",
    ),
    "batch sampler": (
        DataLoader(SAMPLES, batch_sampler=[[0, 1], [2]]),
        r"The order of its list is not kept",
    ),
    "iterable": (
        DataLoader(Endless(), batch_size=3, num_workers=2),
        r"loader\.dataset, .*micro_batch=3\)$",
    ),
}


@pytest.mark.parametrize("case", LOADERS)
def test_a_loader_is_refused_with_the_line_to_write(trial: Trial, case: str) -> None:
    loader, words = LOADERS[case]
    with pytest.raises(Misuse, match=words):
        a_feed(trial, loader, 0)


def test_a_dict_of_splits_is_refused(trial: Trial) -> None:
    with pytest.raises(Misuse, match=r"give one of them: job\.batches\(dataset\['train'\], …\)"):
        a_feed(trial, {"train": SAMPLES, "test": SAMPLES}, 0)

"""The training API refuses values of a wrong type or out of range. The error names the call, the
argument, the value and the fix.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from everstep import Misuse, run
from runtime.a_job import Trial


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    return Trial(tmp_path).track()


def batches(**changes: Any) -> Callable[[Trial], Any]:
    sizes: dict[str, Any] = {"global_batch": 6, "micro_batch": 2}
    return lambda t: t.job.batches(t.dataset, **{**sizes, **changes})


def in_the_loop(act: Callable[[Trial, Any, Any], Any]) -> Callable[[Trial], Any]:
    def take(trial: Trial) -> None:
        step = next(iter(trial.job.steps(until=3)))
        for batch in step.batches(trial.data):
            act(trial, step, batch)

    return take


def paused(limit: Any) -> Callable[[Trial], Any]:
    def enter(trial: Trial) -> None:
        with trial.job.pause("export", limit=limit):
            pass

    return enter


WRONG: dict[str, tuple[Callable[[Trial], Any], str]] = {
    "until as text": (lambda t: next(t.job.steps(until="1e4")), r"until='1e4': give a whole number, 1 or more"),
    "until as a fraction": (lambda t: next(t.job.steps(until=1e4)), r"until=10000\.0"),
    "until of nothing": (lambda t: next(t.job.steps(until=0)), "until=0"),
    "until below zero": (lambda t: next(t.job.steps(until=-5)), "until=-5"),
    "until as a truth": (lambda t: next(t.job.steps(until=True)), "until=True"),
    "batch as text": (batches(global_batch="6"), r"global_batch='6': give a whole number, 1 or more"),
    "batch as a fraction": (batches(micro_batch=0.5), r"micro_batch=0\.5"),
    "batch of nothing": (batches(global_batch=0), "global_batch=0"),
    "micro-batch larger": (batches(micro_batch=7), "micro_batch=7 is larger than global_batch=6"),
    "seed as text": (batches(seed="x"), "seed='x': give a whole number"),
    "collate called": (batches(collate=3), "collate=3: give a function, without calling it"),
    "no dataset": (lambda t: t.job.batches(None, global_batch=1, micro_batch=1), "None.*__getitem__"),
    "a number of samples": (lambda t: t.job.batches(100, global_batch=1, micro_batch=1), "100.*__getitem__"),
    "an empty dataset": (lambda t: t.job.batches([], global_batch=1, micro_batch=1), "list has no samples"),
    "limit as text": (paused("10m"), "limit='10m'.*finite number"),
    "limit without end": (paused(float("inf")), "limit=inf"),
    "sum of text": (lambda t: t.job.sum(1.0, "2"), r"job\.sum\('2'\): it adds numbers"),
    "sum of a list": (lambda t: t.job.sum([1.0, 2.0]), r"job\.sum\(\[1\.0, 2\.0\]\)"),
    "sum before the steps": (lambda t: t.job.sum(1.0), r"job\.sum before job\.steps.*on every rank"),
    "evaluate a list": (lambda t: next(t.job.evaluate([1])), r"evaluate\(list\): it takes what job\.batches"),
    "weight as text": (
        in_the_loop(lambda t, step, batch: step.backward(t.loss(batch), weight="2")),
        "weight='2': a weight is a finite number",
    ),
    "tracking a number": (lambda t: t.job.track(lr=0.1), "a float has no state_dict"),
    "tracking a list": (lambda t: t.job.track(models=[t.model]), "a list has no state_dict"),
    "tracking a class": (lambda t: t.job.track(net=torch.nn.Linear), "Linear is a class; track an instance"),
    "tracking nothing": (lambda t: t.job.track(ema=None), "a NoneType has no state_dict"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_value_is_named_with_its_fix(trial: Trial, case: str) -> None:
    act, words = WRONG[case]
    with pytest.raises(Misuse, match=words):
        act(trial)


@pytest.mark.parametrize("main", [None, "main", 3])
def test_run_is_given_the_function_and_not_what_it_returned(main: Any) -> None:
    with pytest.raises(Misuse, match=r"give it the function: everstep\.run\(main\), not main\(\)"):
        run(main)


def test_run_takes_a_whole_number_as_seed() -> None:
    with pytest.raises(Misuse, match=r"seed='now': give a whole number"):
        run(lambda job: None, seed="now")


def test_numbers_of_numpy_and_torch_are_numbers(trial: Trial) -> None:
    data = trial.job.batches(
        trial.dataset, global_batch=np.int64(6), micro_batch=torch.tensor(2), seed=np.uint8(3)
    )  # fmt: skip
    assert (data.global_batch, data.micro_batch) == (6, 2)
    steps: Iterator[Any] = trial.job.steps(until=np.int32(3))
    step = next(steps)
    assert step.number == 1
    trial.take(step)
    assert trial.job.sum(torch.tensor(1.5), np.float32(2), 1) == (1.5, 2.0, 1.0)

"""A save names the parameters and optimizer state in it that are NaN or infinite."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from everstep import finite
from everstep_contract import wire
from everstep_contract.manifest import ITEM_BYTES
from runtime.a_job import Trial

FLOATS = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2,
    torch.complex64, torch.complex128,
]  # fmt: skip


def judge(tensor: torch.Tensor) -> bool:
    raw = tensor.reshape(-1).contiguous().view(torch.uint8).numpy()
    return finite.is_finite(raw, str(tensor.dtype).removeprefix("torch."))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_value_is_found_wherever_it_is(dtype: torch.dtype, bad: float) -> None:
    for place in (0, 700_000, 1_199_999):
        values = torch.ones(1_200_000).to(dtype)
        assert judge(values)
        values[place] = bad
        assert not judge(values)


@pytest.mark.parametrize("dtype", [d for d in FLOATS if not d.is_complex])
def test_the_largest_numbers_are_finite_though_their_sum_is_not(dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    assert judge(torch.tensor([limits.max] * 3 + [limits.min] * 3, dtype=dtype))
    assert judge(torch.tensor([limits.smallest_normal, 0.0, -0.0], dtype=dtype))


def test_the_type_of_eight_bits_without_infinity() -> None:
    values = torch.tensor([448.0, -448.0]).to(torch.float8_e4m3fn)
    assert judge(values)
    assert not judge(torch.tensor([1.0, float("nan")]).to(torch.float8_e4m3fn))


def test_whole_numbers_and_empty_tensors_always_are() -> None:
    assert judge(torch.full((4,), -1, dtype=torch.int64))
    assert all(finite.is_finite(np.empty(0, np.uint8), dtype) for dtype in ITEM_BYTES)


class Model(torch.nn.Linear):
    """Has buffers that are infinite on purpose."""

    def __init__(self) -> None:
        super().__init__(3, 1)
        self.register_buffer("mask", torch.full((3,), -torch.inf))
        self.register_buffer("least", torch.tensor(torch.inf))


def told(trial: Trial) -> dict[int, tuple[str, ...]]:
    trial.session.saves.copier.wait()
    return {s.step: s.not_finite for s in trial.agent.of(wire.Staged)}


def run(trial: Trial, harm: Any, until: int = 2) -> dict[int, tuple[str, ...]]:
    """Train with a save of each step, and call `harm` before that of step 1. Return what each save reports."""
    for step in trial.job.steps(until=until):
        trial.take(step)
        if step.number == 1:
            harm()
        trial.job.save()
    return told(trial)


def test_a_parameter_is_named(tmp_path: Path) -> None:
    trial = Trial(tmp_path).track()

    def harm() -> None:
        trial.model.bias.data[0] = torch.nan

    with pytest.raises(BaseException, match="status 1"):  # the second step's loss is NaN
        run(trial, harm)
    assert told(trial)[1] == ("model/bias",)


def test_a_moment_of_the_optimizer_is_named(tmp_path: Path) -> None:
    trial = Trial(tmp_path)
    trial.optimizer = torch.optim.AdamW(trial.model.parameters())
    trial.track()

    def harm() -> None:
        trial.optimizer.state[trial.model.weight]["exp_avg_sq"][0, 0] = torch.inf

    assert run(trial, harm)[1] == ("optimizer/state/model.weight/exp_avg_sq",)


def test_buffers_tensors_and_objects_may_be_infinite(tmp_path: Path) -> None:
    trial = Trial(tmp_path)
    trial.model = Model()
    trial.optimizer = torch.optim.SGD(trial.model.parameters(), lr=0.01)
    worst = torch.zeros(2)
    trial.job.track(worst=worst)
    trial.track()

    def harm() -> None:
        trial.model.least.fill_(-torch.inf)
        worst.fill_(torch.nan)

    assert run(trial, harm) == {1: (), 2: ()}


def test_what_was_infinite_from_the_start_is_noted_and_allowed(tmp_path: Path) -> None:
    trial = Trial(tmp_path)
    trial.model.register_parameter("frozen", torch.nn.Parameter(torch.full((2,), -torch.inf)))
    trial.optimizer = torch.optim.SGD([trial.model.weight, trial.model.bias], lr=0.01)
    trial.track()
    assert run(trial, lambda: None) == {1: (), 2: ()}
    notes = [n for a in trial.agent.of(wire.Applied) for n in a.notes]
    assert notes == ["model/frozen holds NaN or infinite values from the start: saves allow them"]


def test_a_post_mortem_save_is_checked_too(tmp_path: Path) -> None:
    trial = Trial(tmp_path).track()
    steps = trial.job.steps(until=3)
    trial.take(next(steps))
    next(steps)
    trial.model.weight.data[0, 0] = torch.inf
    trial.session.saves.stage(1, whole=True)
    assert told(trial) == {1: ("model/weight",)}


def test_no_step_waits_for_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = Trial(tmp_path).track()
    stepped = threading.Event()
    found = finite.FiniteCheck.list_bad

    def late(self: Any, *arguments: Any) -> Any:
        assert stepped.wait(20), (
            "the second step must not wait for the check of the first one's save"
        )
        return found(self, *arguments)

    monkeypatch.setattr(finite.FiniteCheck, "list_bad", late)
    steps = trial.job.steps(until=3)
    step = next(steps)
    trial.job.save()
    trial.take(step)
    trial.take(next(steps))
    stepped.set()
    assert told(trial) == {1: ()}

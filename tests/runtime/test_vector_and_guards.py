"""What the last reduction reports, and when the guard rejects a value."""

import math

import numpy as np
import pytest

from everstep import guards, vector

LAYOUT = vector.Layout(micro_batches=3, samples=5, parameters=2, buffers=1)


def a_rank(index: int, weight: float, loss: float, samples: dict[int, int]) -> np.ndarray:
    numbers = np.zeros(LAYOUT.size)
    parts = LAYOUT.parts(numbers)
    parts.counts[index], parts.weights[index], parts.losses[index] = 1, weight, loss
    parts.scales[index] = 1
    for place, sample in samples.items():
        parts.samples[place] = sample + 1
    return numbers


def test_the_sum_of_all_ranks_carries_each_value_unchanged() -> None:
    ranks = [
        a_rank(0, 2, 0.1, {0: 7, 1: 0}),
        a_rank(1, 2, 0.7, {2: 3, 3: 4}),
        a_rank(2, 1, 1e-17, {4: 9}),
    ]
    for some_order in (ranks, ranks[::-1]):
        summary = vector.read_summary(LAYOUT.parts(sum(some_order, np.zeros(LAYOUT.size))))
        assert summary.samples == (7, 0, 3, 4, 9)
        assert summary.counts == (1, 1, 1)
        assert summary.losses == (0.1, 0.7, 1e-17)
        assert summary.loss == (2 * 0.1 + 2 * 0.7 + 1e-17) / 5
        assert summary.scale == 1.0


def test_a_micro_batch_taken_twice_shows() -> None:
    twice = a_rank(0, 2, 0.1, {0: 7}) + a_rank(0, 2, 0.1, {0: 7})
    assert vector.read_summary(LAYOUT.parts(twice)).counts == (2, 0, 0)


def test_nothing_counted_is_no_loss() -> None:
    assert math.isnan(vector.read_summary(LAYOUT.parts(a_rank(0, 0, 5.0, {}))).loss)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_is_found(loss: float) -> None:
    summary = vector.read_summary(LAYOUT.parts(a_rank(1, 2, loss, {})))
    assert vector.find_not_finite(summary) == 1


def test_a_skipped_batch_offends_nobody() -> None:
    assert vector.find_not_finite(vector.read_summary(LAYOUT.parts(a_rank(1, 0, 0.0, {})))) is None


def jump(value: float, before: list[float], factor: float = 10) -> str:
    return guards.find_jump("loss", value, before, factor=factor, step=12)


def test_a_guard_needs_ten_steps_before_it_speaks() -> None:
    assert not jump(1e9, [1.0] * 9)
    text = "step 12: loss 1e+09 is more than 10 × its mean 1 over the last 10 steps"
    assert jump(1e9, [1.0] * 10) == text


def test_a_guard_is_silent_within_the_factor_and_when_it_is_off() -> None:
    assert not jump(10.0, [1.0] * 10)
    assert not jump(1e9, [1.0] * 10, factor=0)
    assert not jump(5.0, [-1.0] * 10)


def test_a_norm_that_is_infinite_is_out_of_proportion() -> None:
    assert jump(math.inf, [1.0] * 10)


def test_the_window_forgets() -> None:
    window: tuple[float, ...] = ()
    for value in range(150):
        window = guards.extend(window, float(value))
    assert len(window) == guards.WINDOW
    assert window[0] == 50

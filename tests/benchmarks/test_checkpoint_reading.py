"""The figures of `make bench-checkpoint`, from handmade logs."""

import pytest

from everstep_checkpoint.reading import find_durable, judge, judge_loads, percentile
from everstep_checkpoint.workload import Step

EVERY, STEPS = 4, 19
BODY, WAIT, SAVE, DRAG = 0.2, 0.05, 0.03, 0.01


def a_log(*, slower: float = 0.0) -> list[Step]:
    """A rank whose saves cost 30 ms after the step. The next step waits 50 ms longer before it is applied, and the
    next two steps take 10 ms longer.
    """
    now, log = 100.0, list[Step]()
    for number in range(1, STEPS + 1):
        after_save = number > 1 and (number - 1) % EVERY == 0
        drag = DRAG if (number - 1) % EVERY < 2 and number > EVERY else 0.0
        step = Step(number=number, began=now)
        step.computed = step.began + BODY + drag
        step.applying = step.computed + (WAIT if after_save else 0.0)
        step.applied = step.applying + 0.01
        now = step.applied + (SAVE + slower if number % EVERY == 0 else 0.0)
        log.append(step)
    return log


def test_a_stall_is_what_a_save_adds_outside_of_the_computation() -> None:
    cost = judge([a_log()], EVERY)
    assert cost.stalls == pytest.approx([SAVE + WAIT] * 3)
    assert cost.first == pytest.approx(SAVE + WAIT)


def test_the_slowest_rank_counts() -> None:
    cost = judge([a_log(), a_log(slower=0.5)], EVERY)
    assert cost.stalls == pytest.approx([SAVE + WAIT + 0.5] * 3)


def test_what_a_save_adds_to_its_two_steps_counts_wherever_they_wait() -> None:
    """The step after a save takes `DRAG` longer within its computation, which is no stall."""
    cost = judge([a_log(), a_log(slower=0.5)], EVERY)
    assert cost.added == pytest.approx([SAVE + WAIT + DRAG + 0.5] * 3)


def test_the_steps_after_a_save_are_compared_with_those_before_the_next() -> None:
    """The time of a save counts with the step before it."""
    plain = 2 * (BODY + 0.01) + DRAG
    assert judge([a_log()], EVERY).slowdown == pytest.approx((plain + SAVE + WAIT) / plain)


def test_the_time_until_a_save_is_durable_leaves_the_first_out() -> None:
    walls, written = {4: 10.0, 8: 20.0, 12: 30.0, 16: 40.0}, {4: 19.0, 8: 20.3, 12: 30.5}
    assert find_durable(walls, written) == pytest.approx(0.4)
    assert find_durable(walls, {4: 11.0}) is None


def test_a_load_takes_as_long_as_its_slowest_rank_and_the_best_try_counts() -> None:
    ranks = [{"memory": [0.3, 0.2, 0.4]}, {"memory": [0.1, 0.5, 0.1]}]
    assert judge_loads(ranks) == {"memory": 0.3}
    assert judge_loads([]) == {}


@pytest.mark.parametrize(("share", "value"), [(0.5, 2), (0.99, 4), (0.25, 1), (1.0, 4)])
def test_percentiles_are_values_of_the_list(share: float, value: int) -> None:
    assert percentile([4, 2, 3, 1], share) == value

"""Unit tests of what `make bench-storm` reads from the logs of two ranks, with four samples a step."""

from collections.abc import Sequence

import pytest

from everstep_recovery.lines import Line
from everstep_storm.goodput import compare_states, count_again, judge_storm, list_steps

BATCH = 4


def line(
    t: float, step: int, rank: int, *, world: int = 2, pid: int = 0, began: float = 0.0,
    samples: Sequence[int] | None = None,
) -> Line:  # fmt: skip
    """A line of a rank, by default one of two ranks with half of the step's samples."""
    first = (step - 1) * BATCH + 2 * rank
    return Line(
        t=t, began=began, pid=pid or rank + 1, step=step, rank=rank, world=world,
        samples=tuple(samples if samples is not None else (first, first + 1)),
    )  # fmt: skip


def steps(*times: float, first: int = 1) -> list[Line]:
    """The lines of undisturbed steps that both ranks end at these times."""
    return [line(t, step, rank) for step, t in enumerate(times, first) for rank in (0, 1)]


def test_samples_of_steps_that_ended_within_the_storm_are_its_output() -> None:
    outcome = judge_storm(steps(1.0, 2.0, 3.0, 9.0), [], began=1.5, seconds=4.0, batch=BATCH)
    assert (outcome.steps, outcome.samples, outcome.samples_per_second) == (2, 8, 2.0)
    assert outcome.progress == (0, 1, 2, 2, 2), "batches after 0, 1, … 4 seconds"
    assert (outcome.steps_again, outcome.samples_lost, outcome.samples_repeated) == (0, 0, 0)


def test_a_pause_is_the_time_from_a_fault_to_a_new_step_of_all() -> None:
    found = [*steps(1.0), line(4.0, 2, 0, world=1, samples=(4, 5, 6, 7))]
    outcome = judge_storm(found, [1.5, 4.5], began=0.0, seconds=5.0, batch=BATCH)
    assert outcome.pauses == (pytest.approx(2.5), None), "no step followed the second fault"


def test_samples_that_a_smaller_group_left_out_are_lost() -> None:
    found = [*steps(1.0), line(2.0, 2, 0, world=1), *steps(3.0, first=3)]
    outcome = judge_storm(found, [], began=0.0, seconds=3.0, batch=BATCH)
    assert (outcome.samples, outcome.samples_lost) == (10, 2)


def test_a_rank_that_dies_before_its_line_was_in_the_sum_if_the_other_names_its_group() -> None:
    found = [*steps(1.0), line(2.0, 2, 0, world=2), *steps(3.0, first=3)]
    outcome = judge_storm(found, [], began=0.0, seconds=3.0, batch=BATCH)
    assert (outcome.samples, outcome.samples_lost) == (12, 0)


def test_no_more_is_credited_to_a_rank_without_a_line_than_the_step_lacks() -> None:
    found = [line(1.0, 1, 0, world=2, samples=(0, 1, 2, 3))]
    assert [step.samples for step in list_steps(found, BATCH)] == [BATCH]


def test_steps_that_were_rolled_back_count_once_when_they_are_taken_again() -> None:
    again = [
        line(t, step, rank, pid=rank + 8, began=2.5)
        for step, t in ((2, 4.0), (3, 5.0)) for rank in (0, 1)
    ]  # fmt: skip
    found = [*steps(1.0, 2.0), *again]
    outcome = judge_storm(found, [2.2], began=0.0, seconds=5.0, batch=BATCH)
    assert (outcome.steps, outcome.samples) == (3, 12)
    assert (outcome.steps_again, outcome.samples_repeated) == (1, 0)
    assert outcome.progress == (0, 1, 1, 1, 2, 3), (
        "step 2 counts when it was taken for the last time"
    )


def test_a_step_that_not_all_had_applied_is_none_that_is_taken_again() -> None:
    found = [line(1.0, 1, 0), line(5.0, 1, 0, pid=8), line(5.0, 1, 1, pid=9)]
    assert count_again(found) == 0


def test_a_sample_that_a_later_step_uses_again_is_repeated() -> None:
    found = [line(1.0, 1, 0, world=1, samples=(0, 1, 2, 3))]
    found += [line(2.0, 2, 0, world=1, samples=(3, 4, 5, 6))]
    outcome = judge_storm(found, [], began=0.0, seconds=2.0, batch=BATCH)
    assert (outcome.samples, outcome.samples_repeated, outcome.samples_lost) == (7, 1, 1)


def test_a_system_that_logged_nothing_has_no_output() -> None:
    outcome = judge_storm([], [1.0], began=0.0, seconds=2.0, batch=BATCH)
    assert (outcome.samples, outcome.pauses, outcome.progress) == (0, (None,), (0, 0, 0))


def test_states_are_compared_at_the_steps_that_both_runs_logged() -> None:
    calm = {"9": "a", "100": "b", "200": "c"}
    assert compare_states(calm, {"100": "b", "300": "z"}) == (1, [])
    assert compare_states(calm, {"9": "a", "100": "b", "200": "x"}) == (3, [200])


def test_the_quiet_rate_is_that_of_the_last_third_between_two_faults() -> None:
    times = [1.0, 4.0, 5.0, 6.0, 6.5, 7.0, 7.5, 8.0, 14.0, 15.0]
    outcome = judge_storm(steps(*times), [2.0, 8.2, 16.0], began=0.0, seconds=16.0, batch=BATCH)
    assert outcome.quiet_samples_per_second == pytest.approx((3 + 1) * BATCH / (1.5 + 1.0))


def test_seconds_before_a_fault_at_a_smaller_size_are_not_quiet() -> None:
    small = [line(t, step, 0, world=1) for step, t in ((2, 3.0), (3, 3.5), (4, 3.9))]
    outcome = judge_storm([*steps(1.0), *small], [1.5, 4.0], began=0.0, seconds=4.0, batch=BATCH)
    assert outcome.quiet_samples_per_second is None

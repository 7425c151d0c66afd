"""Unit tests of what `make bench-recovery` reads from the ranks' logs."""

import pytest

from everstep_recovery.lines import Line, parse_lines
from everstep_recovery.reading import count_samples, judge, list_history

SIZE = 2


def lines(
    *rows: tuple[float, int, int, int, tuple[int, ...]], began: dict[int, float] | None = None
) -> list[Line]:
    """Rows are (t, pid, step, rank, samples). The world is SIZE, or 1 for pids ≥ 90."""
    begins = began or {}
    found = [
        Line(
            t=t, began=begins.get(pid, 0.0), pid=pid, step=step, rank=rank,
            world=1 if pid >= 90 else SIZE, samples=samples,
        )
        for t, pid, step, rank, samples in rows
    ]  # fmt: skip
    return sorted(found, key=lambda line: line.t)


BEFORE = ((1.0, 1, 1, 0, (0,)), (1.1, 2, 1, 1, (1,)), (2.0, 1, 2, 0, (2,)), (2.1, 2, 2, 1, (3,)))


def test_nothing_is_lost_where_the_next_step_follows() -> None:
    found = lines(*BEFORE, (5.0, 3, 3, 0, (4,)), (5.5, 4, 3, 1, (5,)), began={3: 4.0, 4: 4.0})
    cost = judge(found, 2.5, SIZE)
    assert cost.seconds_to_next_step == cost.seconds_to_full_size == pytest.approx(3.0), (
        "the next step and the full size come at once, with the last rank"
    )
    assert (cost.steps_lost, cost.samples_lost, cost.samples_repeated) == (0, 0, 0)


def test_a_step_of_the_survivor_alone_is_the_next_step_but_not_full_size() -> None:
    found = lines(*BEFORE, (3.0, 90, 3, 0, (4, 5)))
    cost = judge(found, 2.5, SIZE)
    assert cost.seconds_to_next_step == pytest.approx(0.5)
    assert cost.seconds_to_full_size is None


def test_a_rank_that_finishes_the_step_that_others_had_is_no_step_again() -> None:
    found = lines(*BEFORE[:3], (2.6, 2, 2, 1, (3,)), (3.0, 1, 3, 0, (4,)), (3.0, 2, 3, 1, (5,)))
    cost = judge(found, 2.5, SIZE)
    assert cost.seconds_to_next_step == pytest.approx(0.5)
    assert cost.steps_lost == 0


def test_a_rank_that_died_before_its_line_was_in_the_step_that_the_others_name() -> None:
    after = ((3.0, 90, 3, 0, (4, 5)), (4.0, 90, 4, 0, (6, 7)))
    assert judge(lines(*BEFORE[:3], *after), 2.05, SIZE).samples_lost == 0


def test_a_lost_unit_takes_two_ranks_and_neither_left_a_line_of_the_last_step() -> None:
    """Ranks 2 and 3 shard one copy of the model. One was killed, and the other could not end the step."""
    whole = [a_line(1.0, 1, rank, 4, rank) for rank in range(4)]
    last = [a_line(2.0, 2, rank, 4, 4 + rank) for rank in (0, 1)]
    alone = [a_line(3.0, 3, rank, 2, 8 + rank, 10 + rank) for rank in (0, 1)]
    cost = judge([*whole, *last, *alone], 2.5, 4)
    assert cost.seconds_to_next_step == pytest.approx(0.5)
    assert cost.seconds_to_full_size is None
    assert (cost.steps_lost, cost.samples_lost, cost.samples_repeated) == (0, 0, 0)
    assert cost.split is not None
    assert (cost.split.passes_again, cost.split.again) == (1, pytest.approx(0.1))


def a_line(t: float, step: int, rank: int, world: int, *samples: int) -> Line:
    """A line with a pass of 0.1 s for each sample."""
    passes = tuple(0.1 for _ in samples)
    return Line(
        t=t, began=0.0, pid=rank, step=step, rank=rank, world=world, samples=samples, passes=passes
    )


def test_a_step_that_the_end_of_the_run_interrupts_loses_no_samples() -> None:
    """The rank without a line has the lower half of each shard's samples."""
    found = lines(*BEFORE, (3.0, 1, 3, 0, (4, 5)), (3.1, 2, 3, 1, (6, 7)), (4.0, 2, 4, 1, (10, 11)))
    assert judge(found, 2.5, SIZE).samples_lost == 0


def test_samples_that_a_smaller_group_left_out_are_lost() -> None:
    after = (
        (3.0, 90, 3, 0, (4,)),
        (4.0, 90, 4, 0, (6,)),
        (5.0, 1, 5, 0, (8,)),
        (5.0, 2, 5, 1, (9,)),
    )
    assert judge(lines(*BEFORE, *after), 2.5, SIZE).samples_lost == 2


def test_going_back_takes_steps_again_and_repeats_no_sample_of_the_final_history() -> None:
    again = ((5.0, 3, 2, 0, (2,)), (5.1, 4, 2, 1, (3,)), (6.0, 3, 3, 0, (4,)), (6.1, 4, 3, 1, (5,)))
    found = lines(*BEFORE, *again, began={3: 4.0, 4: 4.0})
    cost = judge(found, 2.5, SIZE)
    assert cost.steps_lost == 1
    assert cost.seconds_to_next_step == pytest.approx(3.6)
    assert (cost.samples_lost, cost.samples_repeated) == (0, 0)
    assert len(list_history(found)) == 6


def test_a_process_that_stays_and_goes_back_takes_its_steps_out_of_the_history() -> None:
    def record(t: float, pid: int, step: int, *samples: int, world: int = 2) -> dict[str, object]:
        rank = pid - 1 if world == 2 else 0
        return {
            "event": "step", "t": t, "pid": pid, "step": step, "rank": rank, "world": world,
            "samples": samples,
        }  # fmt: skip

    begins = [{"event": "begin", "t": 0.0, "pid": pid} for pid in (1, 2)]
    before = [
        record(1.0, 1, 1, 0),
        record(2.0, 1, 2, 2),
        record(1.1, 2, 1, 1),
        record(2.2, 2, 2, 3),
    ]
    again = [record(6.0, 1, 2, 2, 3, world=1), record(7.0, 1, 3, 4, 5, world=1)]
    found = parse_lines([*begins, *before, *again])
    cost = judge(found, 2.5, SIZE)
    assert (cost.steps_lost, cost.samples_lost, cost.samples_repeated) == (1, 0, 0)
    assert [line.step for line in list_history(found)] == [1, 1, 2, 3]


def test_a_newcomer_takes_nothing_out_of_the_survivors_history() -> None:
    joined = ((4.0, 1, 3, 0, (4,)), (4.1, 3, 3, 1, (5,)))
    assert len(list_history(lines(*BEFORE, *joined, began={3: 3.0}))) == 6


def test_samples_are_lost_below_the_furthest_of_a_shard_and_repeated_if_used_twice() -> None:
    history = lines((1.0, 1, 1, 0, (0, 2, 8)), (1.0, 2, 1, 1, (1, 3, 3)))
    assert count_samples(history, SIZE) == (2, 1), "4 and 6 are lost, 3 is used twice"


def test_records_of_a_process_bear_its_begin() -> None:
    step = {"event": "step", "pid": 7, "t": 2.0, "step": 1, "rank": 0, "world": 1, "samples": [1]}
    (line,) = parse_lines([{"event": "begin", "pid": 7, "t": 1.0}, step])
    assert (line.began, line.samples) == (1.0, (1,))

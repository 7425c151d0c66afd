"""Unit tests of the parts of the time to the next step, read from the ranks' logs."""

import pytest

from everstep_recovery.lines import Line
from everstep_recovery.splitting import Split, split_next_step

PASS, STEP, USUAL = 0.25, 1.0, 2


def a_line(t: float, rank: int, step: int, passes: int = USUAL, pid: int | None = None) -> Line:
    return Line(
        t=t, began=0.0, pid=rank if pid is None else pid, step=step, rank=rank, world=3,
        samples=(), passes=(PASS,) * passes,
    )  # fmt: skip


def steps(until: int) -> list[Line]:
    """Steps of three ranks, one second each. Rank 2 is the last one, 0.1 s after rank 0."""
    return [
        a_line(STEP * n + 0.05 * rank, rank, n) for n in range(1, until + 1) for rank in range(3)
    ]


def split(after: list[Line], fault: float, complete: float, before: int = 5) -> Split:
    found = split_next_step([*steps(before), *after], fault, complete)
    assert found is not None
    return found


def test_the_rest_of_the_step_and_the_passes_of_the_dead_rank_cannot_be_saved() -> None:
    """A rank dies 0.4 s after step 5. One survivor computes its two micro-batches, the other none."""
    found = split([a_line(6.9, 0, 6, 4), a_line(7.0, 1, 6)], fault=5.5, complete=7.0)
    assert (found.step, found.passes_again) == (pytest.approx(STEP), 2)
    assert found.rest == pytest.approx(0.6)
    assert found.again == pytest.approx(2 * PASS)
    assert found.beyond == pytest.approx(1.5 - 0.6 - 0.5)


def test_passes_that_are_shared_out_are_computed_side_by_side() -> None:
    found = split([a_line(6.9, 0, 6, 3), a_line(7.0, 1, 6, 3)], fault=5.5, complete=7.0)
    assert (found.passes_again, found.again) == (1, PASS)


def test_a_step_that_takes_longer_than_usual_without_a_fault_has_no_rest_left() -> None:
    found = split([a_line(8.0, 0, 6), a_line(8.0, 1, 6)], fault=7.9, complete=8.0)
    assert (found.rest, found.passes_again) == (0.0, 0)
    assert found.beyond == pytest.approx(0.1)


def test_a_rank_that_only_finishes_the_step_that_others_had_computes_nothing_again() -> None:
    late = [line for line in steps(5) if line.step < 5 or line.rank == 0]
    after = [a_line(5.2, 1, 5), a_line(6.2, 0, 6, 3), a_line(6.3, 1, 6, 3)]
    found = split_next_step([*late, *after], 5.02, 6.3)
    assert found is not None
    assert found.passes_again == 1
    assert found.rest == pytest.approx(STEP - 0.02, abs=0.06)


def test_steps_that_are_taken_again_are_computed_again() -> None:
    """New processes take the steps 4, 5 and 6. A survivor that went back takes 5 and 6."""
    fresh = [a_line(20.0 + n, 0, n, pid=90) for n in (4, 5, 6)]
    assert split(fresh, fault=5.5, complete=26.0).passes_again == 2 * USUAL
    back = [a_line(20.0 + n, 0, n) for n in (5, 6)]
    assert split(back, fault=5.5, complete=26.0).passes_again == USUAL


def test_without_steps_or_passes_before_the_fault_nothing_is_said() -> None:
    assert split_next_step(steps(1), 1.5, 2.0) is None
    bare = [a_line(float(n), 0, n, passes=0) for n in range(1, 6)]
    assert split_next_step(bare, 5.5, 6.0) is None

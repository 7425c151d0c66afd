"""The training script's own log, independent of the job's status."""

from pathlib import Path

from everstep_demo.steplog import (
    Applied,
    StepLog,
    compare_logs,
    find_first,
    list_recomputed,
)


def applied(rank: int, step: int, at: float, loss: float = 0.5) -> Applied:
    return Applied(rank=rank, step=step, loss=loss, at=at, pid=100 + rank)


def run(*steps: int, rank: int = 0, begun: float = 0.0) -> list[Applied]:
    return [applied(rank, step, begun + at) for at, step in enumerate(steps)]


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    log = StepLog(tmp_path)
    (tmp_path / "rank-1").write_text("1 0x1.8p-1 10.5 77\n2 0x1.0p-1 11.")
    assert log.read() == [Applied(rank=1, step=1, loss=0.75, at=10.5, pid=77)]


def test_a_new_log_forgets_the_last_run(tmp_path: Path) -> None:
    (tmp_path / "rank-0").write_text("1 0x1.8p-1 10.5 77\n")
    assert StepLog(tmp_path).read() == []


def test_steps_in_one_line_are_not_recomputed() -> None:
    assert list_recomputed(run(1, 2, 3) + run(1, 2, 3, rank=1)) == []


def test_what_a_rank_applied_twice_was_recomputed() -> None:
    assert list_recomputed(run(1, 2, 3, 2, 3, 4)) == [2, 3]


def test_what_was_recomputed_before_belongs_to_an_earlier_fault() -> None:
    assert list_recomputed(run(1, 2, 2, 3, 3), after=3.5) == [3]


def test_the_first_new_step_is_the_first_time_that_a_rank_applied_it_for_good() -> None:
    log = [*run(1, 2, 3, begun=10.0), applied(1, 3, 11.5), applied(0, 3, 40.0), applied(1, 3, 41.0)]
    assert find_first(log, 3, after=11.0) == 40.0
    assert find_first(log, 4, after=11.0) is None


def test_logs_of_two_runs_are_equal_step_by_step() -> None:
    undisturbed = run(1, 2, 3)
    found = compare_logs([applied(0, 1, 1.0), applied(0, 3, 3.0, loss=0.25)], undisturbed, steps=3)
    assert (found.missing, found.other_losses, found.recomputed) == ((2,), (3,), ())


def test_a_step_taken_again_with_another_loss_is_another_loss() -> None:
    found = compare_logs([applied(0, 1, 1.0), applied(0, 1, 2.0, loss=0.25)], run(1), steps=1)
    assert (found.other_losses, found.recomputed) == ((1,), (1,))

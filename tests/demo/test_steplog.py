"""The training script's own log, which does not depend on the job's status."""

from pathlib import Path

from everstep_demo.steplog import (
    Applied,
    StepLog,
    compare_logs,
    find_first,
    find_process,
    find_whole,
    list_pauses,
    list_recomputed,
)


def applied(rank: int, step: int, at: float, loss: float = 0.5, pid: int | None = None) -> Applied:
    return Applied(rank=rank, step=step, loss=loss, at=at, pid=100 + rank if pid is None else pid)


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


def test_all_step_again_once_the_last_process_has_applied_the_step() -> None:
    log = [applied(0, 7, 20.0), applied(1, 7, 20.5), applied(1, 7, 9.0, pid=55)]
    assert find_whole(log, 7, 2, after=10.0) == 20.5
    assert find_whole(log, 7, 3, after=10.0) is None, (
        "one of the three lines is from the process that died"
    )


def test_the_pauses_are_those_of_all_processes_but_the_one_that_the_fault_hit() -> None:
    """After the loss another process has the lost rank."""
    hit = [applied(1, 1, 1.0), applied(1, 2, 2.0)]
    kept = [applied(2, 1, 1.1), applied(2, 2, 2.1), applied(1, 3, 4.0, pid=102)]
    log = [*hit, *kept, *run(1, 2, 3, begun=1.0)]
    assert find_process(log, rank=1, before=3.0) == 101
    assert find_process(log, rank=1, before=0.5) is None
    assert list_pauses(log, without=101) == [(2.1, 1.0), (4.0, 1.9)]


def test_logs_of_two_runs_are_equal_step_by_step() -> None:
    undisturbed = run(1, 2, 3)
    found = compare_logs([applied(0, 1, 1.0), applied(0, 3, 3.0, loss=0.25)], undisturbed, steps=3)
    assert (found.missing, found.other_losses, found.recomputed) == ((2,), (3,), ())


def test_a_step_taken_again_with_another_loss_is_another_loss() -> None:
    found = compare_logs([applied(0, 1, 1.0), applied(0, 1, 2.0, loss=0.25)], run(1), steps=1)
    assert (found.other_losses, found.recomputed) == ((1,), (1,))

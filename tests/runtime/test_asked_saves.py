"""`job.save`: the step that runs now is saved at its end, under the names that the script gives."""

from pathlib import Path

from everstep_contract import wire
from runtime.a_job import Trial


def staged(trial: Trial) -> list[tuple[int, tuple[str, ...]]]:
    trial.session.copier.wait()
    return [(s.step, s.pins) for s in trial.agent.of(wire.Staged)]


def test_it_saves_the_end_of_the_step_in_which_it_is_called(tmp_path: Path) -> None:
    trial = Trial(tmp_path).track()
    for step in trial.job.steps(until=5):
        if step.number == 2:
            trial.job.save(pin="epoch-1")
            trial.job.save(pin="best")
            trial.job.save(pin="epoch-1")
        if step.number == 3:
            trial.job.save()
        trial.take(step)
    assert staged(trial) == [(2, ("epoch-1", "best")), (3, ()), (5, ())]


def test_the_last_step_is_saved_once_and_pinned(tmp_path: Path) -> None:
    trial = Trial(tmp_path).track()
    for step in trial.job.steps(until=2):
        trial.take(step)
        if step.number == 2:
            trial.job.save(pin="end")
    assert staged(trial) == [(2, ("end",))]


def test_a_save_that_finds_no_room_still_tells_the_names(tmp_path: Path) -> None:
    trial = Trial(tmp_path).track()
    trial.agent.uploads = False  # the slots stay in use
    steps = trial.job.steps(until=4)
    for number in (1, 2, 3):
        step = next(steps)
        trial.job.save(pin=f"step-{number}")
        trial.take(step)
    next(steps)
    trial.session.copier.wait()
    told = trial.agent.of(wire.Staged)
    assert [(s.step, s.pins) for s in told if s.problem] == [(3, ("step-3",))]

"""When the launcher gives up a run that is interrupted repeatedly."""

from everstep_agent.local.progress import WINDOW_SECONDS, Interruptions

HOUR = 3600.0


def test_interruptions_between_which_a_step_is_taken_never_add_up() -> None:
    found = Interruptions()
    for number in range(1000):
        found = found.reach(number).add(number * HOUR)
        assert found.count == 1


def test_interruptions_without_a_new_step_add_up() -> None:
    found = Interruptions().reach(12)
    for number in range(11):
        found = found.add(float(number)).reach(12)
    assert found.count == 11


def test_a_step_that_is_taken_again_is_no_progress() -> None:
    """Both agents are lost before each checkpoint, so the run repeats the same steps."""
    found = Interruptions().reach(50)
    for number in range(3):
        found = found.add(float(number)).reach(40).reach(50)
    assert found.count == 3
    assert found.reach(51).count == 0


def test_what_is_older_than_the_window_does_not_count() -> None:
    found = Interruptions().add(0.0).add(WINDOW_SECONDS - 1.0)
    assert found.count == 2
    assert found.add(WINDOW_SECONDS).count == 2


def test_several_at_once_are_counted_one_by_one() -> None:
    assert Interruptions().add(1.0, 3).count == 3
    assert Interruptions().add(1.0, 0).count == 0

"""The estimate of how long a first build still takes, from its progress."""

import pytest

from everstep_lab.buildtime import Remaining, share_compiled, shown


def test_at_first_it_is_what_was_measured() -> None:
    assert Remaining(work=540.0).left(360.0, 0.0, 0.0) == 540.0


def test_at_the_measured_pace_the_rest_is_what_was_measured() -> None:
    assert Remaining(work=540.0).left(360.0, 0.5, 180.0) == pytest.approx(360.0)


@pytest.mark.parametrize("slower", [0.5, 2.0, 4.0])
def test_on_another_machine_it_comes_near_the_truth_as_the_build_goes_on(slower: float) -> None:
    remaining = Remaining(work=540.0)
    misses = []
    for share in (0.1, 0.5, 0.9):
        truth = slower * (540.0 - share * 360.0)
        told = remaining.left(360.0, share, slower * share * 360.0)
        misses.append(abs(told - truth) / truth)
    assert misses == sorted(misses, reverse=True)
    assert misses[-1] < 0.1


def test_the_pace_of_one_module_is_that_of_the_next() -> None:
    remaining = Remaining(work=540.0).after(360.0, 1080.0)
    assert remaining.left(180.0, 0.0, 0.0) == pytest.approx(180.0 * 3, rel=0.1)


def test_when_all_is_compiled_the_commands_are_still_to_be_linked() -> None:
    assert share_compiled(0, 100) == 0.0
    assert 0.5 < share_compiled(100, 100) < 1.0
    assert share_compiled(120, 100) == share_compiled(100, 100)
    assert share_compiled(0, 0) == 0.0


def test_it_is_shown_in_minutes() -> None:
    assert shown(540.0) == "about 9 min left"
    assert shown(29.0) == "less than a minute left"

import pytest

from everstep.stretches import KNOWN_STEPS, STEPS, Stretches
from everstep_contract.position import Stretch


def a_rank(*seconds: float, kind: Stretch = Stretch.COMPUTE) -> Stretches:
    """A rank that has taken steps with these longest stretches."""
    found = Stretches()
    for one in seconds:
        found.add(kind, one / 2)
        found.add(kind, one)
        found.end_step()
    return found


def test_a_limit_is_learnt_once_enough_steps_are_known():
    assert a_rank(*[1.0] * (KNOWN_STEPS - 1)).limit(Stretch.COMPUTE) == 0
    assert a_rank(*[1.0] * KNOWN_STEPS).limit(Stretch.COMPUTE) == 3.0


def test_the_limit_of_short_stretches_is_a_third_of_a_second_at_least():
    assert a_rank(*[0.01] * 60).limit(Stretch.COMPUTE) == 0.3


def test_one_long_step_of_a_hundred_does_not_widen_the_limit_and_two_do():
    usual = [0.2] * 298
    assert a_rank(*usual, 9.0, 9.0).limit(Stretch.COMPUTE) == pytest.approx(0.6)
    assert a_rank(*[0.2] * 290, *[9.0] * 10).limit(Stretch.COMPUTE) == 27.0


def test_old_steps_are_forgotten():
    assert a_rank(*[9.0] * 100, *[0.2] * STEPS).limit(Stretch.COMPUTE) == pytest.approx(0.6)


def test_fetching_data_has_a_wider_limit_of_its_own():
    rank = a_rank(*[1.0] * 60, kind=Stretch.FETCH)
    assert (rank.limit(Stretch.FETCH), rank.limit(Stretch.COMPUTE)) == (10.0, 0.3)
    assert a_rank(*[0.01] * 60, kind=Stretch.FETCH).limit(Stretch.FETCH) == 5.0


def test_nothing_is_learnt_of_other_scopes_and_waits_have_the_limit_of_computing():
    rank = a_rank(*[0.2] * 60)
    rank.add(Stretch.OTHER, 100.0)
    rank.add(Stretch.WAIT, 100.0)
    assert rank.limit(Stretch.OTHER) == 0
    rank.add(Stretch.SUM, 100.0)
    assert rank.limit(Stretch.WAIT) == rank.limit(Stretch.SUM) == pytest.approx(0.6)
    assert rank.limit(Stretch.WAIT) == rank.limit(Stretch.COMPUTE) == pytest.approx(0.6)


def test_the_limit_of_the_group_is_learnt_from_its_sums_and_no_shorter_than_that_of_a_rank():
    assert a_rank(*[0.5] * 60, kind=Stretch.SUM).group_limit == 1.5
    assert a_rank(*[0.01] * 60, kind=Stretch.SUM).group_limit == 1.0
    assert a_rank(*[2.0] * 60).group_limit == 6.0
    assert a_rank(*[0.5] * (KNOWN_STEPS - 1), kind=Stretch.SUM).group_limit == 0

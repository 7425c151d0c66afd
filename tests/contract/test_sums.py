"""The message about the sum that a rank delays."""

from everstep_contract.sums import Sums, describe_missed


def sums(joined: int, complete: int = 0, step: int = 71, reduction: int = 0) -> Sums:
    return Sums(step=step, reduction=reduction, buckets=3, joined=joined, complete=complete)


def test_the_sum_that_a_rank_missed_is_the_one_in_which_the_others_wait() -> None:
    others = [sums(4, 2), sums(4, 1)]
    missed = "it missed bucket 2 of 3 in reduction 0 of step 71, in which the others wait"
    assert describe_missed(sums(1), others) == missed
    assert describe_missed(None, others) == missed, (
        "a rank without sums has not begun the reduction"
    )
    assert "it missed the vector in" in describe_missed(sums(3), [sums(4, 3)])


def test_a_rank_that_was_stopped_in_a_sum_has_launched_it() -> None:
    assert describe_missed(sums(4), [sums(4, 1)]) == (
        "the others wait in bucket 2 of 3 in reduction 0 of step 71, which it has launched and not completed"
    )
    assert "it missed" in describe_missed(sums(4, step=70), [sums(4)]), (
        "the rank's sums are of an earlier step"
    )


def test_nothing_is_missed_where_the_others_wait_in_no_sum() -> None:
    assert describe_missed(sums(1), []) == ""


def test_the_first_sum_that_a_rank_has_not_launched() -> None:
    assert sums(2).describe_next() == "bucket 3 of 3 in reduction 0 of step 71"
    assert sums(3).describe_next() == "the vector in reduction 0 of step 71"
    assert sums(4).describe_next() == ""

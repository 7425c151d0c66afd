"""Ranks whose scripts have made other feeds."""

from agent.given import an_epoch, stepping
from everstep_agent.coordinator.unlike_feeds import describe_unlike_feeds


def find(*feeds: dict[str, str]) -> str:
    reports = [stepping(slot, feeds=own) for slot, own in enumerate(feeds)]
    return describe_unlike_feeds(an_epoch(len(feeds)), reports)


def test_a_feed_that_differs_is_named_with_the_ranks() -> None:
    same, other = {"1": "8 samples", "2": "5 samples"}, {"1": "8 samples", "2": "6 samples"}
    assert find(same, same, same) == ""
    assert find(same, other, same) == (
        "job.batches, feed 2: the ranks differ: 5 samples on ranks 0, 2; 6 samples on rank 1. Give all pods the "
        "same data and the same script"
    )


def test_a_feed_that_only_some_ranks_report_is_no_difference() -> None:
    """An older version reports none, and a script may evaluate on one rank."""
    assert find({"1": "8 samples"}, {}, {"1": "8 samples", "extra": "2 samples"}) == ""

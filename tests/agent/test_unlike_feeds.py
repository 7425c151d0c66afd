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


def test_ranks_that_split_a_dataset_differently_are_told_where_to_split_it() -> None:
    told = find(
        {"1": "80 samples, global_batch 4, micro_batch 2, shuffle True, seed 0, indices 1f"},
        {"1": "80 samples, global_batch 4, micro_batch 2, shuffle True, seed 0, indices 2e"},
    )
    assert "indices 1f on rank 0" in told
    assert told.endswith("make a random split in main, where all ranks draw the same numbers")

"""What the ledger and the feeds' records prove about samples, and which errors they reveal."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from agent.a_run import entry
from everstep_agent.tools.feed_proof import Feeds, list_feed_notes
from everstep_contract.feed import FeedRecord, Order, Segment
from everstep_contract.ledger import LedgerEntry

ORDER = Order(length=8, seed=0, shuffle=True)
PASS = (3, 1, 4, 7, 5, 0, 2, 6)
NEXT = (6, 7, 1, 0, 2, 5, 3, 4)


def segment(
    step: int, draws: int, *, sample: int = 0, global_batch: int = 4, **changes: object
) -> Segment:
    made = Segment(
        step=step, sample=sample, global_batch=global_batch, micro_batch=2, draws=draws, order=ORDER
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def ledger(*batches: Sequence[int], feed: str = "1") -> list[LedgerEntry]:
    """The entries of steps 1, 2, …; an empty batch means that the step drew from another feed."""
    return [
        entry(step, samples=tuple(batch), feed=feed)
        for step, batch in enumerate(batches, start=1)
        if batch
    ]


def problems(entries: Sequence[LedgerEntry], *segments: Segment) -> list[str]:
    return find_feed_problems(entries, {"1": FeedRecord(segments=segments)})


def find_feed_problems(
    entries: Sequence[LedgerEntry], records: Mapping[str, FeedRecord] | None
) -> list[str]:
    feeds = Feeds(records)
    for one in entries:
        feeds.add(one)
    if repeats := feeds.find_repeats():
        for one in entries:
            repeats.add(one)
    return feeds.problems()


def test_whole_passes_and_one_that_is_under_way_are_in_order() -> None:
    assert problems(ledger(PASS[:4], PASS[4:], NEXT[:4]), segment(1, 3)) == []


def test_another_global_batch_at_the_next_sample_is_in_order_and_noted() -> None:
    entries = ledger(PASS[:4], PASS[4:6], PASS[6:], NEXT[:2])
    segments = (segment(1, 1), segment(2, 3, sample=4, global_batch=2))
    assert problems(entries, *segments) == []
    assert list_feed_notes({"1": FeedRecord(segments=segments)}) == [
        "feed 1, step 2: global_batch was 4, is 2"
    ]


def test_samples_used_twice_are_counted_with_both_steps() -> None:
    """Regression: the position came from the step alone, so a smaller global batch repeated samples."""
    entries = ledger(PASS[:4], PASS[4:], PASS[4:6], PASS[6:])
    segments = (segment(1, 2), segment(3, 2, sample=4, global_batch=2))
    assert problems(entries, *segments) == ["feed 1: step 3 goes on with sample 4, but 8 came next"]
    inside = problems(ledger(PASS[:4], (4, 7, 5, 0)), segment(1, 2))
    assert inside == [
        "feed 1: sample 4 was used twice in one pass over the data, at steps 1 and 2 (and 1 more)",
        "feed 1: a pass over the data ended at step 2 without 2 of 8 samples; the first of them is 2",
    ]


def test_the_first_use_of_a_repeated_sample_is_looked_for_in_its_own_pass() -> None:
    """Step 3 ends one pass and begins the next one."""
    entries = ledger(PASS[:3], PASS[3:6], (*PASS[6:], 0), NEXT[:2], (0, 5))
    segments = (segment(1, 3, global_batch=3), segment(4, 2, sample=9, global_batch=2))
    assert problems(entries, *segments) == [
        "feed 1: sample 0 was used twice in one pass over the data, at steps 3 and 5"
    ]


def test_samples_that_were_left_out_are_found() -> None:
    segments = (segment(1, 1), segment(2, 1, sample=6, global_batch=2))
    entries = ledger(PASS[:4], PASS[6:])
    assert problems(entries, *segments) == ["feed 1: step 2 goes on with sample 6, but 4 came next"]


def test_a_change_of_the_order_is_named_with_its_step_and_a_new_pass_begins() -> None:
    other = replace(ORDER, seed=1)
    new = segment(2, 2, order=other, change="seed was 0, is 1")
    assert problems(ledger(PASS[:4], NEXT[:4], NEXT[4:]), segment(1, 1), new) == [
        "feed 1: the order changed at step 2: seed was 0, is 1, after 4 of 8 samples of a pass"
    ]


def test_draws_that_only_one_side_knows_are_found() -> None:
    assert problems(ledger(PASS[:4]), segment(1, 2)) == [
        "feed 1: 2 steps from step 1 on drew from it, the ledger has 1"
    ]
    assert problems(ledger(PASS[:4], PASS[4:]), segment(1, 1)) == [
        "feed 1: step 2 drew from it, but the checkpoint has no record of that"
    ]
    assert problems(ledger((), PASS[:4]), segment(1, 1)) == [
        "feed 1: step 1 drew from it first, in the ledger step 2"
    ]
    assert problems(ledger(PASS[:2]), segment(1, 1)) == [
        "feed 1: step 1 used 2 samples, global_batch is 4"
    ]
    assert find_feed_problems(ledger(PASS[:4], feed="x"), {}) == [
        "feed x: the ledger has it, the checkpoint has no record of it"
    ]


def test_a_sample_that_the_dataset_does_not_have_is_found() -> None:
    assert problems(ledger((0, 1, 2, 8)), segment(1, 1)) == ["feed 1: step 1 used sample 8 of 8"]


def test_each_feed_is_judged_alone_and_a_step_need_not_draw() -> None:
    common = ledger(PASS[:4], (), PASS[4:])
    rare = [replace(e, feed="2", reduction=1) for e in ledger((), NEXT[:4])]
    records = {
        "1": FeedRecord(segments=(segment(1, 2),)),
        "2": FeedRecord(segments=(segment(2, 1),)),
    }
    entries = sorted([*common, *rare], key=lambda e: e.step)
    assert find_feed_problems(entries, records) == []
    assert list_feed_notes(records) == ["feed 2 starts at step 2"]


def test_two_loops_over_one_feed_count_once() -> None:
    entries = [e for x in ledger(PASS[:4], PASS[4:]) for e in (x, replace(x, reduction=1))]
    assert problems(entries, segment(1, 2)) == []


def test_an_iterable_is_proved_by_places_and_noted() -> None:
    endless = segment(1, 2, order=Order(length=None, seed=0, shuffle=True))
    assert problems(ledger(range(4), range(4, 8)), endless) == []
    assert problems(ledger(range(4), range(5, 9)), endless) == [
        "feed 1: step 2 used position 5 instead of 4"
    ]
    assert "can only be iterated" in list_feed_notes({"1": FeedRecord(segments=(endless,))})[0]


def test_a_ledger_without_feeds_is_not_called_in_order() -> None:
    old = [replace(e, feed="") for e in ledger(PASS[:4], PASS[4:])]
    text = "steps 1 to 2 were written by a version that did not record feeds"
    assert find_feed_problems(old, None)[0].startswith(text)
    later = [replace(e, step=e.step + 2) for e in ledger(NEXT[:4])]
    assert len(problems([*old, *later], segment(3, 1, sample=8))) == 1
    assert problems(later, segment(3, 1, sample=8)) == [
        "feed 1 starts at step 3 with sample 8, not 0"
    ]

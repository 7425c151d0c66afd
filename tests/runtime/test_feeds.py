"""Where a feed continues: across steps, resumes and edits of the script."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import IterableDataset, Subset

from everstep import feed_rules
from everstep.batches import Batches, build_settings
from everstep.errors import Misuse, StateError
from everstep.feeds import Feeds, decode_settings
from everstep.transfer import Taken
from everstep_contract import wire
from everstep_contract.feed import FeedRecord, decode_records
from runtime.a_commit import commit
from runtime.a_job import Trial

SIZE = 24


class Life:
    """The feeds in one life of a worker; `drawn` holds the samples of each step."""

    def __init__(self, before: "Life | None" = None, *, recorded: bool = True) -> None:
        self.applied = before.applied if before else 0
        self.notes: list[str] = []
        saved = {"feeds": before.feeds.encode()} if before and recorded else {}
        records = decode_records(saved) if before else {}
        self.feeds = Feeds(records, applied=self.applied, note=self.notes.append)
        self.drawn: dict[int, list[int]] = dict(before.drawn) if before else {}

    def feed(
        self,
        size: int = SIZE,
        *,
        name: str | None = None,
        on_change: str = "Refuse",
        **settings: Any,
    ) -> Batches:
        data = range(size)
        given = build_settings(data, **({"global_batch": 4, "micro_batch": 2} | settings))
        made = Batches(data, given, name=self.feeds.choose_name(name), collate=list)
        self.feeds.add(made, on_change=on_change)
        return made

    def take(self, feed: Batches, *, count: bool = True) -> list[int]:
        """Take one step that draws from `feed`; return its samples."""
        self.feeds.close()
        step = self.applied + 1
        first = self.feeds.draw(feed, step)
        found = [i for m in range(feed.micro_batches) for i in feed.ids(first, m)]
        if count:
            self.end_step(found)
        return found

    def end_step(self, found: Sequence[int] = ()) -> None:
        self.feeds.count_draws()
        self.applied += 1
        self.drawn[self.applied] = list(found)

    @property
    def used(self) -> list[int]:
        return [i for step in sorted(self.drawn) for i in self.drawn[step]]

    def records(self) -> dict[str, FeedRecord]:
        return decode_records({"feeds": self.feeds.encode()}) or {}

    def join(self, member: "Life", *, older: bool = False) -> None:
        """Join `member`, which may be `older` than the version that hands over settings."""
        settings = (
            None if older else decode_settings({"feed_settings": member.feeds.encode_settings()})
        )
        self.feeds.adopt(member.records(), member.applied, settings)
        self.applied = member.applied


class Shuffled(IterableDataset[int]):
    """Has another order in each pass, which depends on the random numbers of Python."""

    def __init__(self, samples: Sequence[int]) -> None:
        self._samples = samples

    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(self._samples, len(self._samples)))


def a_life(steps: int, **settings: Any) -> Life:
    life = Life()
    feed = life.feed(**settings)
    for _ in range(steps):
        life.take(feed)
    return life


@pytest.mark.parametrize("after", [1, 3, 5])
def test_a_resume_takes_the_samples_that_an_undisturbed_run_would(after: int) -> None:
    life = a_life(after)
    resumed = Life(life)
    feed = resumed.feed()
    for _ in range(9 - after):
        resumed.take(feed)
    assert resumed.drawn == a_life(9).drawn
    assert resumed.records() == a_life(9).records()
    assert resumed.notes == []


@pytest.mark.parametrize("size", [2, 3, 12])
def test_another_global_batch_goes_on_with_the_next_unused_sample(size: int) -> None:
    resumed = Life(a_life(3))
    feed = resumed.feed(global_batch=size)
    while len(resumed.used) < 2 * SIZE:
        resumed.take(feed)
    assert sorted(resumed.used[:SIZE]) == sorted(resumed.used[SIZE : 2 * SIZE]) == [*range(SIZE)]
    first, second = resumed.records()["1"].segments
    assert (first.step, first.sample, first.global_batch, first.draws) == (1, 0, 4, 3)
    assert (second.step, second.sample, second.global_batch) == (4, 12, size)
    assert second.change == ""
    assert resumed.notes == [
        f"feed 1, from step 4 on: global_batch was 4, is {size}: it goes on with the next unused sample"
    ]


def test_another_micro_batch_changes_no_sample_and_is_noted() -> None:
    resumed = Life(a_life(3))
    feed = resumed.feed(micro_batch=4)
    for _ in range(3):
        resumed.take(feed)
    assert resumed.drawn == a_life(6).drawn
    assert "micro_batch was 2, is 4: the samples stay the same" in resumed.notes[0]


CHANGES = {
    "length": ({}, {"size": 30}, "length was 24 samples, is 30"),
    "seed": ({"seed": 3}, {"seed": 5}, "seed was 3, is 5"),
    "shuffle": ({}, {"shuffle": False}, "shuffle was True, is False"),
    "fingerprint": ({"fingerprint": "a"}, {"fingerprint": "b"}, "fingerprint was 'a', is 'b'"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_change_of_the_order_is_refused_with_both_values_and_the_fix(case: str) -> None:
    before, now, words = CHANGES[case]
    with pytest.raises(StateError, match=words) as found:
        Life(a_life(3, **before)).feed(**now)
    assert "feed 1: the run cannot continue exactly after step 3" in str(found.value)
    assert 'on_change="Continue"' in str(found.value)


@pytest.mark.parametrize("case", CHANGES)
def test_a_change_that_the_script_insists_on_is_recorded_with_its_step(case: str) -> None:
    before, now, words = CHANGES[case]
    resumed = Life(a_life(3, **before))
    feed = resumed.feed(**now, on_change="Continue")
    resumed.take(feed)
    last = resumed.records()["1"].last
    assert (last.step, last.change) == (4, words)
    assert last.sample == (12 if case == "fingerprint" else 0)
    assert words in resumed.notes[0]
    again = Life(resumed)
    again.take(again.feed(**now))
    assert again.records()["1"].last.draws == 2
    assert again.notes == []


def test_a_seed_that_orders_nothing_may_change() -> None:
    resumed = Life(a_life(3, shuffle=False, seed=1))
    assert resumed.take(resumed.feed(shuffle=False, seed=2)) == [12, 13, 14, 15]
    assert "the order does not depend on it" in resumed.notes[0]


def draw_shuffled(life: Life, seed: int, on_change: str = "Refuse") -> list[int]:
    """Take a step that draws 8 of the 12 samples of a dataset that shuffles itself."""
    data = Shuffled(range(12))
    given = build_settings(data, global_batch=8, micro_batch=8, seed=seed)
    feed = Batches(data, given, collate=list)
    life.feeds.add(feed, on_change=on_change)
    found: list[int] = feed.source.read(life.take(feed))
    return found


def test_another_seed_of_an_iterable_is_another_order() -> None:
    life = Life()
    first = draw_shuffled(life, 3)
    with pytest.raises(StateError, match=r"continue exactly after step 1: seed was 3, is 5"):
        draw_shuffled(Life(life), 5)
    insisting = Life(life)
    found = draw_shuffled(insisting, 5, "Continue")
    assert found == draw_shuffled(Life(), 5) != first
    last = insisting.records()["1"].last
    assert (last.step, last.sample, last.change) == (2, 0, "seed was 3, is 5")
    assert insisting.notes == [
        "feed 1, from step 2 on: seed was 3, is 5: the order changes; training goes on at sample 0 of the new one"
    ]
    draw_shuffled(same := Life(life), 3)
    assert same.notes == []


def test_content_that_cannot_be_compared_any_more_is_noted() -> None:
    resumed = Life(a_life(3, fingerprint="a"))
    resumed.take(resumed.feed())
    assert "fingerprint was given, is not now" in resumed.notes[0]


def test_a_feed_that_is_not_drawn_at_every_step_loses_no_sample() -> None:
    life = Life()
    common, rare = life.feed(), life.feed(seed=9)
    seen: list[int] = []
    for step in range(1, 19):
        if step == 8:
            life = Life(life)
            common, rare = life.feed(), life.feed(seed=9, global_batch=6)
        if step % 3:
            life.take(common)
        else:
            seen += life.take(rare)
    assert sorted(seen[:SIZE]) == [*range(SIZE)]
    first, second = life.records()["2"].segments
    assert (first.step, first.draws, second.step, second.sample) == (3, 2, 9, 8)


def test_two_loops_over_one_feed_see_the_same_samples_and_use_them_once() -> None:
    life = Life()
    feed = life.feed()
    assert life.take(feed, count=False) == life.take(feed)
    assert life.records()["1"].last.draws == 1


def test_two_feeds_may_be_drawn_in_one_step() -> None:
    life = Life()
    one, other = life.feed(), life.feed(global_batch=8)
    life.take(one, count=False)
    life.take(other)
    assert {n: r.last.next_sample for n, r in life.records().items()} == {"1": 4, "2": 8}


def test_a_step_that_was_not_applied_used_nothing() -> None:
    life = a_life(2)
    life = Life(life)
    feed = life.feed()
    lost = life.take(feed, count=False)
    again = Life(life)
    assert again.take(again.feed()) == lost


def test_a_feed_for_evaluation_is_in_no_checkpoint_and_may_change() -> None:
    life = Life()
    train, held_out = life.feed(), life.feed(7)
    life.take(train)
    assert held_out.name not in life.records()
    resumed = Life(life)
    train = resumed.feed()
    resumed.feed(9)
    assert resumed.take(train) == a_life(2).drawn[2]


def test_a_feed_added_before_another_is_told_to_take_a_name() -> None:
    resumed = Life(a_life(3))
    with pytest.raises(StateError, match=r"length was 24 samples, is 7.*give that one a name"):
        resumed.feed(7)
    resumed = Life(a_life(3))
    resumed.feed(7, name="held out")
    assert resumed.take(resumed.feed()) == a_life(4).drawn[4]


def test_a_feed_under_another_name_does_not_begin_anew_unseen() -> None:
    resumed = Life(a_life(3))
    feed = resumed.feed(name="train")
    with pytest.raises(StateError, match=r"feed train: .* its feed 1\. .*name='1'"):
        resumed.take(feed)
    resumed = Life(a_life(3))
    assert resumed.take(resumed.feed(name="train", on_change="Continue")) == a_life(1).drawn[1]
    assert resumed.records()["train"].last.change == "feed 1 is not continued"


def test_a_feed_that_is_really_new_is_noted() -> None:
    resumed = Life(a_life(3))
    resumed.feed()
    resumed.take(resumed.feed(name="more"))
    assert resumed.notes == ["feed more is new: step 4 begins it with its first sample"]


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("on_change", ["Refuse", "Continue"])
@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"size": 30}, "length was 24 samples, is 30"),
        ({"global_batch": 8}, "global_batch was 4, is 8"),
        ({}, ""),
    ],
)
def test_a_newcomer_whose_data_differ_from_the_members_data_does_not_join(
    settings: dict[str, Any], told: str, on_change: str, older: bool
) -> None:
    members, newcomer = a_life(3), Life()
    feed = newcomer.feed(on_change=on_change, **settings)
    if told:
        with pytest.raises(StateError, match=f"differs from the running ranks: {told}"):
            newcomer.join(members, older=older)
        return
    newcomer.join(members, older=older)
    assert newcomer.take(feed) == a_life(4).drawn[4]


EDITS = [
    ({"global_batch": 8}, "global_batch was 8, is 4"),
    ({"micro_batch": 4}, "micro_batch was 4, is 2"),
    ({"seed": 5}, "seed was 5, is 0"),
    ({"fingerprint": "b"}, "fingerprint was 'b', is 'a'"),
]


@pytest.mark.parametrize(("edit", "told"), EDITS)
def test_a_newcomer_joins_members_that_have_not_drawn_from_a_feed_since_its_edit(
    edit: dict[str, Any], told: str
) -> None:
    before = {"fingerprint": "a"}
    members = Life(a_life(3, **before))
    theirs = members.feed(**before | edit, on_change="Continue")
    newcomer, unedited = Life(), Life()
    feed = newcomer.feed(**before | edit, on_change="Continue")
    newcomer.join(members)
    assert newcomer.take(feed) == members.take(theirs)
    unedited.feed(**before)
    with pytest.raises(StateError, match=f"differs from the running ranks: {told}"):
        unedited.join(members)


def test_a_feed_that_the_members_have_not_drawn_from_is_compared_without_its_content() -> None:
    members, newcomer, other = Life(), Life(), Life()
    for life, size, fingerprint in ((members, 7, "a"), (newcomer, 7, None), (other, 9, "a")):
        life.feed(size, name="held out", fingerprint=fingerprint)
    newcomer.join(members)
    with pytest.raises(StateError, match=r"feed held out: .* length was 7 samples, is 9"):
        other.join(members)


def a_rare_feed(folder: Path, global_batch: int, **start: Any) -> tuple[Trial, Batches]:
    folder.mkdir()
    trial = Trial(folder, **start).track()
    return trial, trial.job.batches(
        trial.dataset, global_batch=global_batch, micro_batch=2, name="rare"
    )


def test_a_member_hands_over_the_settings_of_a_feed_that_it_has_not_drawn_from(
    tmp_path: Path,
) -> None:
    first, rare = a_rare_feed(tmp_path / "first", 4)
    for step in first.job.steps(until=1):
        for batch in step.batches(rare):
            step.backward(first.loss(batch))
        first.optimizer.step()
    said = commit(tmp_path, first.agent.of(wire.Staged)[-1:])
    member, _ = a_rare_feed(tmp_path / "member", 8, **said)
    for step in member.job.steps(until=2):
        member.take(step)
    held = member.session.capture()
    newcomer, _ = a_rare_feed(tmp_path / "newcomer", 8)
    newcomer.session.settle(9)
    newcomer.session.adopt(
        Taken(applied=2, tree=held.tree, tensors=held.tensors, parts=frozenset())
    )
    assert newcomer.session.applied == 2


def test_a_newcomer_that_cannot_read_the_feeds_of_a_member_says_so(tmp_path: Path) -> None:
    """Its agent starts it again; any other error would count as one of the script."""
    (tmp_path / "newcomer").mkdir()
    newcomer = Trial(tmp_path / "newcomer").track()
    newcomer.session.settle(9)
    held = newcomer.session.capture()
    tree = {**held.tree, "feeds": {"1": {"segments": []}}}
    taken = Taken(applied=2, tree=tree, tensors=held.tensors, parts=frozenset())
    with pytest.raises(StateError, match=r"state of a running rank: feeds\.1\.segments"):
        newcomer.session.adopt(taken)
    assert newcomer.session.applied == 0


def test_a_feed_is_described_by_what_is_the_same_on_every_rank() -> None:
    first, second = Life(), Life()
    first.feed(fingerprint="a"), second.feed(fingerprint="b")
    assert first.feeds.describe() == second.feeds.describe()
    assert first.feeds.describe() == {
        "1": "24 samples, global_batch 4, micro_batch 2, shuffle True, seed 0"
    }


def test_another_random_split_of_a_dataset_is_another_dataset() -> None:
    def describe(*indices: int) -> tuple[str | None, str]:
        part = Subset(Subset(range(9), [8, 7, 6, 5, 4]), list(indices))
        settings = build_settings(part, global_batch=1, micro_batch=1)
        return settings.order.fingerprint, feed_rules.describe(settings)

    first, told = describe(0, 1, 2)
    assert told.endswith(f", {first}")
    assert describe(0, 1, 2) == (first, told)
    assert describe(0, 1, 3)[0] not in (None, first)
    given = build_settings(Subset(range(9), [1]), global_batch=1, micro_batch=1, fingerprint="a")
    assert given.order.fingerprint == "a"
    named: Any = Subset(range(9), ["of a dataset", "with names"])  # type: ignore[list-item]
    assert build_settings(named, global_batch=1, micro_batch=1).order.fingerprint is None


def test_a_feed_is_made_before_the_loop_and_its_name_is_its_own() -> None:
    life = Life()
    life.feed(name="train")
    with pytest.raises(Misuse, match="two feeds have the name 'train'"):
        life.feed(name="train")
    life.feeds.close()
    with pytest.raises(Misuse, match=r"made inside the loop over job\.steps"):
        life.take(life.feed())


@pytest.mark.parametrize("name", ["train", None])
def test_a_call_of_batches_that_is_refused_makes_no_feed(tmp_path: Path, name: str | None) -> None:
    """A script may catch the error, and call it again without data workers."""
    trial, dataset = Trial(tmp_path), [lambda: 0] * 6
    settings = {"global_batch": 2, "micro_batch": 2, "name": name}
    with pytest.raises(Misuse, match="workers=0"):
        trial.job.batches(dataset, workers=1, **settings)
    assert trial.job.batches(dataset, **settings).name == (name or "2")


def test_a_checkpoint_without_records_goes_on_where_that_version_would_have() -> None:
    resumed = Life(a_life(3), recorded=False)
    assert resumed.take(resumed.feed()) == a_life(4).drawn[4]
    assert "from a version that did not record feeds" in resumed.notes[0]
    assert "global_batch=4" in resumed.notes[0]
    again = Life(resumed)
    assert again.take(again.feed()) == a_life(5).drawn[5]
    assert again.notes == []

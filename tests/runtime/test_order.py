"""Which samples form a step."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from everstep import order
from everstep.errors import Misuse
from everstep.feed import Batches


@given(size=some.integers(1, 400), key=some.integers(0, 2**64 - 1))
def test_a_permutation_takes_every_place_once(size: int, key: int) -> None:
    found = order.permute(np.arange(size), size=size, key=key)
    assert sorted(found.tolist()) == list(range(size))


def test_a_permutation_is_the_same_for_one_place_and_for_all() -> None:
    together = order.permute(np.arange(1000), size=1000, key=3)
    alone = [int(order.permute(np.array([i]), size=1000, key=3)[0]) for i in range(1000)]
    assert together.tolist() == alone


def test_the_order_never_changes_between_versions() -> None:
    """A run that resumes under another version must see the samples that it would have seen."""
    assert order.sample_ids(0, 8, size=10, seed=1, shuffle=True) == FROZEN


FROZEN = [7, 5, 3, 1, 9, 2, 8, 4]


def test_each_pass_has_an_order_of_its_own_and_another_seed_another() -> None:
    first = order.sample_ids(0, 100, size=100, seed=0, shuffle=True)
    second = order.sample_ids(100, 100, size=100, seed=0, shuffle=True)
    other = order.sample_ids(0, 100, size=100, seed=1, shuffle=True)
    assert sorted(first) == sorted(second) == sorted(other) == list(range(100))
    assert len({tuple(first), tuple(second), tuple(other)}) == 3
    assert sum(a == b for a, b in zip(first, range(100), strict=True)) < 10


def a_feed(size: int = 10, global_batch: int = 4, micro_batch: int = 3, seed: int = 0) -> Batches:
    return Batches(
        range(size), global_batch=global_batch, micro_batch=micro_batch, seed=seed, shuffle=True, collate=list
    )  # fmt: skip


def test_batches_straddle_passes_and_drop_nothing() -> None:
    feed = a_feed(size=10, global_batch=4)
    seen = [i for step in range(1, 6) for m in range(feed.micro_batches) for i in feed.ids(step, m)]
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))


def test_the_samples_of_a_step_do_not_depend_on_the_micro_batch_size() -> None:
    by_size = {
        size: [i for m in range(a_feed(micro_batch=size).micro_batches) for i in a_feed(micro_batch=size).ids(3, m)]
        for size in (1, 2, 3, 4)
    }  # fmt: skip
    assert len({tuple(ids) for ids in by_size.values()}) == 1


def test_the_last_micro_batch_may_be_smaller() -> None:
    assert [len(a_feed().places(m)) for m in range(a_feed().micro_batches)] == [3, 1]


@pytest.mark.parametrize(
    ("dataset", "sizes", "words"),
    [
        (iter([1]), (4, 2), "can only be iterated"),
        ([], (4, 2), "no samples"),
        (range(9), (0, 2), "global_batch=0"),
        (range(9), (4, 0), "micro_batch=0"),
        (range(9), (4, 5), "larger than global_batch=4"),
    ],
)
def test_data_that_cannot_be_cut_is_refused(
    dataset: object, sizes: tuple[int, int], words: str
) -> None:
    with pytest.raises(Misuse, match=words):
        Batches(
            dataset, global_batch=sizes[0], micro_batch=sizes[1], seed=0, shuffle=True, collate=None
        )

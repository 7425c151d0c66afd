"""Which samples form a step."""

import random
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch.utils.data import IterableDataset

from everstep import order, randomness
from everstep.batches import Batches, build_settings
from everstep.errors import Misuse


@given(size=some.integers(1, 400), key=some.integers(0, 2**64 - 1))
def test_a_permutation_takes_every_place_once(size: int, key: int) -> None:
    found = order.permute(np.arange(size), size=size, key=key)
    assert sorted(found.tolist()) == list(range(size))


def test_a_permutation_is_the_same_for_one_place_and_for_all() -> None:
    together = order.permute(np.arange(1000), size=1000, key=3)
    alone = [int(order.permute(np.array([i]), size=1000, key=3)[0]) for i in range(1000)]
    assert together.tolist() == alone


def test_the_order_never_changes_between_versions() -> None:
    """A run that resumes with another version must get the same samples."""
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
    data = range(size)
    settings = build_settings(data, global_batch=global_batch, micro_batch=micro_batch, seed=seed)
    return Batches(data, settings, collate=list)


def test_batches_straddle_passes_and_drop_nothing() -> None:
    feed = a_feed(size=10, global_batch=4)
    seen = [i for n in range(5) for m in range(feed.micro_batches) for i in feed.ids(4 * n, m)]
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))


def test_the_samples_of_a_step_do_not_depend_on_the_micro_batch_size() -> None:
    by_size = {
        size: [i for m in range(a_feed(micro_batch=size).micro_batches) for i in a_feed(micro_batch=size).ids(8, m)]
        for size in (1, 2, 3, 4)
    }  # fmt: skip
    assert len({tuple(ids) for ids in by_size.values()}) == 1


def test_the_last_micro_batch_may_be_smaller() -> None:
    assert [len(a_feed().places(m)) for m in range(a_feed().micro_batches)] == [3, 1]


@pytest.mark.parametrize(
    ("dataset", "sizes", "words"),
    [
        (iter([1]), (4, 2), "can be iterated once only"),
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
        Batches(dataset, build_settings(dataset, global_batch=sizes[0], micro_batch=sizes[1]))


class Counting(IterableDataset[int]):
    """Ten samples, the same in each iteration."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(100, 110))


def a_stream(dataset: IterableDataset[Any] | None = None) -> Batches:
    dataset = dataset or Counting()
    return Batches(dataset, build_settings(dataset, global_batch=4, micro_batch=2), collate=list)


def test_a_stream_is_shared_by_places_and_goes_round() -> None:
    whole = a_stream()
    read = [whole.source.read(whole.ids(first, m)) for first in (0, 4, 8) for m in (0, 1)]
    assert [s for batch in read for s in batch] == [*range(100, 110), 100, 101]


class Counted(IterableDataset[int]):
    """Counts what is read from it. Each pass shuffles its 50 samples."""

    def __init__(self) -> None:
        self.read = 0

    def __iter__(self) -> Iterator[int]:
        for sample in random.sample(range(50), 50):
            self.read += 1
            yield sample


def test_going_back_in_a_step_reads_nothing_again() -> None:
    """As after a loss, and in a second loop. The second step spans two passes."""
    dataset = Counted()
    stream = Batches(
        dataset, build_settings(dataset, global_batch=40, micro_batch=10, seed=3), collate=list
    )
    for first in (0, 40):
        found = read_stream(stream, [(first, m) for m in (1, 3, 0, 2)])
        again = read_stream(stream, [(first, m) for m in (1, 3, 0, 2)])
        assert dataset.read == first + 40
        assert again == found


def test_a_stream_keeps_one_global_batch() -> None:
    class Samples(IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            for number in range(100):
                made.append(weakref.ref(sample := torch.tensor(number)))
                yield sample

    made: list[weakref.ref[torch.Tensor]] = []
    stream = a_stream(Samples())
    stream.source.read(stream.ids(40, 0))
    assert [number for number, sample in enumerate(made) if sample() is not None] == [
        38,
        39,
        40,
        41,
    ]


def test_collate_may_take_items_out_of_a_sample() -> None:
    class Dicts(IterableDataset[dict[str, int]]):
        def __iter__(self) -> Iterator[dict[str, int]]:
            return iter([{"label": number} for number in range(10)])

    dataset = Dicts()
    settings = build_settings(dataset, global_batch=4, micro_batch=2)
    stream = Batches(dataset, settings, collate=lambda samples: [s.pop("label") for s in samples])
    assert [stream.source.read([2, 3]) for _ in range(2)] == [[2, 3]] * 2


def test_an_iterable_that_keeps_its_iterator_is_refused_when_it_has_to_start_again() -> None:
    class Once(IterableDataset[int]):
        def __init__(self) -> None:
            self._samples = iter(range(6))

        def __iter__(self) -> Iterator[int]:
            return self._samples

    stream = a_stream(Once())
    assert stream.source.read(stream.ids(4, 0)) == [4, 5]
    with pytest.raises(Misuse, match=r"Once yielded 6 samples, and none .* return a new iterator"):
        stream.source.read(stream.ids(4, 1))


def test_a_stream_is_resumed_by_skipping_what_was_read_and_can_be_read_again() -> None:
    resumed = a_stream()
    assert resumed.source.read(resumed.ids(8, 1)) == [100, 101]
    assert resumed.source.read(resumed.ids(0, 1)) == [102, 103]


class Unsteady(IterableDataset[int]):
    """The read of its third sample fails once, as when a connection breaks. Then its generator has ended."""

    def __init__(self) -> None:
        self.failures = 1

    def __iter__(self) -> Iterator[int]:
        for sample in range(100, 110):
            if sample == 102 and self.failures:
                self.failures -= 1
                raise ConnectionError("the connection is lost")
            yield sample


def test_a_stream_that_has_failed_serves_the_same_samples_again() -> None:
    """A script may catch the exception and skip the batch."""
    stream = a_stream(Unsteady())
    with pytest.raises(ConnectionError):
        stream.source.read(stream.ids(0, 1))
    assert stream.source.read(stream.ids(4, 0)) == [104, 105]


class SkipsDamaged:
    """An iterator that goes on after an exception. Its sample 2 is damaged."""

    def __init__(self) -> None:
        self._numbers = iter(range(10))

    def __iter__(self) -> "SkipsDamaged":
        return self

    def __next__(self) -> int:
        if (number := next(self._numbers)) == 2:
            raise ValueError("sample 2 is damaged")
        return number


def test_an_iterator_that_goes_on_after_an_exception_is_not_read_again() -> None:
    class Damaged(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return SkipsDamaged()

    stream = a_stream(Damaged())
    with pytest.raises(ValueError, match="damaged"):
        stream.source.read(stream.ids(0, 1))
    assert stream.source.read(stream.ids(0, 1)) == [3, 4]


class Shuffled(IterableDataset[int]):
    """Eight samples, in another order in each pass."""

    def __iter__(self) -> Iterator[int]:
        order = [*range(4), *np.random.permutation(range(4, 8)).tolist()]
        random.shuffle(order)
        for place in torch.randperm(8).tolist():
            yield order[place]


def read_stream(stream: Batches, wanted: Sequence[tuple[int, int]]) -> list[int]:
    """Read (first sample, micro-batch) as a rank does, with other random numbers before each one."""
    found: list[int] = []
    for first, index in wanted:
        randomness.seed_all("elsewhere", first, index, len(wanted))
        found += stream.source.fetch(stream.request(first, index))
    return found


def test_a_stream_that_shuffles_has_the_same_order_on_all_ranks_and_after_a_resume() -> None:
    firsts = range(0, 24, 4)
    alone = read_stream(a_stream(Shuffled()), [(first, m) for first in firsts for m in (0, 1)])
    assert [sorted(alone[at : at + 8]) for at in (0, 8, 16)] == [[*range(8)]] * 3
    assert len({tuple(alone[at : at + 8]) for at in (0, 8, 16)}) == 3
    for m in (0, 1):
        own = read_stream(a_stream(Shuffled()), [(first, m) for first in firsts])
        assert own == [s for at in range(0, 24, 4) for s in alone[at + 2 * m : at + 2 * m + 2]]
    resumed = read_stream(a_stream(Shuffled()), [(first, m) for first in (12, 16) for m in (0, 1)])
    assert resumed == alone[12:20]
    before = torch.get_rng_state()
    a_stream(Shuffled()).source.read([0, 1])
    assert torch.equal(torch.get_rng_state(), before), "it draws nobody else's random numbers"


def test_a_stream_has_no_pass_to_evaluate() -> None:
    with pytest.raises(Misuse, match="needs a dataset with __len__"):
        _ = a_stream().pass_micro_batches


def test_a_stream_without_samples_is_refused() -> None:
    class Nothing(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(())

    empty = a_stream(Nothing())
    with pytest.raises(Misuse, match="yields no samples"):
        empty.source.read(empty.ids(0, 0))


@settings(max_examples=40)
@given(
    size=some.integers(1, 3000),
    takes=some.lists(some.tuples(some.integers(0, 5000), some.integers(1, 1500)), max_size=6),
)
def test_blocks_hold_the_same_order(size: int, takes: list[tuple[int, int]]) -> None:
    blocks = order.Blocks(size=size, seed=3, shuffle=True)
    for first, count in takes:
        expected = order.sample_ids(first, count, size=size, seed=3, shuffle=True)
        assert blocks.take(first, count) == expected

"""How micro-batches, buckets and the parts of a save are divided among the ranks."""

from hypothesis import given
from hypothesis import strategies as some

from everstep import shares
from everstep.shares import Parameter, TensorSize, part_of
from everstep_contract.units import ONE_RANK


def test_32_micro_batches_over_3_ranks_are_11_11_10() -> None:
    assert [len(shares.plan_share(r, 3, 32)) for r in range(3)] == [11, 11, 10]


@given(world=some.integers(1, 9), count=some.integers(0, 40))
def test_every_micro_batch_has_one_rank(world: int, count: int) -> None:
    taken = [m for r in range(world) for m in shares.plan_share(r, world, count)]
    assert taken == list(range(count))


def a_parameter(elements: int, kind: str = "cpu/float32") -> Parameter:
    return Parameter(elements=elements, item_bytes=4, kind=kind)


def test_buckets_are_filled_from_the_last_parameter_backward() -> None:
    plan = shares.plan_buckets([a_parameter(10) for _ in range(5)], limit_bytes=80)
    assert plan == [[4, 3], [2, 1], [0]]


def test_a_parameter_larger_than_a_bucket_has_one_alone() -> None:
    assert shares.plan_buckets([a_parameter(2), a_parameter(99), a_parameter(2)], 80) == [
        [2],
        [1],
        [0],
    ]


def test_a_bucket_holds_one_kind() -> None:
    kinds = [a_parameter(1, "a"), a_parameter(1, "b"), a_parameter(1, "a")]
    assert shares.plan_buckets(kinds, 80) == [[2, 0], [1]]


shapes = some.lists(some.integers(0, 5), max_size=3).map(tuple)


@given(sizes=some.lists(shapes, max_size=8), world=some.integers(1, 5))
def test_the_parts_of_a_save_hold_every_row_once(sizes: list[tuple[int, ...]], world: int) -> None:
    extents = [TensorSize(name=str(i), shape=s, item_bytes=4) for i, s in enumerate(sizes)]
    parts = [shares.plan_part(extents, part_of(ONE_RANK, r, world)) for r in range(world)]
    for extent in extents:
        rows = [
            row
            for part in parts
            for held in part
            if held.name == extent.name
            for row in range(held.first, held.last)
        ]
        assert rows == list(range(extent.shape[0] if extent.shape else 1))
        assert any(held.name == extent.name for part in parts for held in part)


def test_the_parts_of_a_save_are_about_equal() -> None:
    extents = [TensorSize(name=str(i), shape=(100, 10), item_bytes=4) for i in range(7)]
    rows = [
        sum(b.last - b.first for b in shares.plan_part(extents, part_of(ONE_RANK, r, 4)))
        for r in range(4)
    ]
    assert max(rows) - min(rows) <= 2

"""How micro-batches, buckets and the parts of a save are divided among the ranks."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as some

from everstep import shares
from everstep.buckets import BUCKET_BYTES
from everstep.shares import Parameter, Part, TensorSize, part_of
from everstep_contract.units import ONE_RANK, Mesh


def test_32_micro_batches_over_3_ranks_are_11_11_10() -> None:
    assert [len(shares.plan_share(r, 3, 32)) for r in range(3)] == [11, 11, 10]


@given(world=some.integers(1, 9), count=some.integers(0, 40))
def test_every_micro_batch_has_one_rank(world: int, count: int) -> None:
    taken = [m for r in range(world) for m in shares.plan_share(r, world, count)]
    assert taken == list(range(count))


def a_parameter(elements: int, kind: str = "cpu/float32") -> Parameter:
    return Parameter(elements=elements, item_bytes=4, kind=kind)


def test_buckets_are_filled_from_the_last_parameter_backward() -> None:
    plan = shares.plan_buckets([a_parameter(10) for _ in range(6)], limit_bytes=160)
    assert plan == [[5, 4], [3, 2], [1, 0]]


def test_buckets_of_one_kind_have_about_the_same_size() -> None:
    """Six layers of a weight and a bias, in two buckets: a small rest would be a third one."""
    layers = [a_parameter(n) for _ in range(6) for n in (1000, 2)]
    assert shares.plan_buckets(layers, limit_bytes=24_000) == [
        [11, 10, 9, 8, 7, 6],
        [5, 4, 3, 2, 1, 0],
    ]


@pytest.mark.parametrize(
    ("mebibytes", "count"),
    [(0, 1), (1, 1), (23, 1), (24, 2), (35, 2), (36, 3), (96, 8), (190, 8), (200, 9), (2400, 100)],
)
def test_small_models_have_buckets_of_half_the_limit_or_more(mebibytes: int, count: int) -> None:
    assert shares.count_buckets(mebibytes * 2**20, BUCKET_BYTES) == count


@given(
    sizes=some.lists(some.tuples(some.integers(0, 50), some.sampled_from("ab")), max_size=30),
    limit=some.integers(8, 400),
)
def test_each_parameter_is_in_one_bucket_of_its_kind(
    sizes: list[tuple[int, str]], limit: int
) -> None:
    plan = shares.plan_buckets([a_parameter(n, kind) for n, kind in sizes], limit)
    assert sorted(i for bucket in plan for i in bucket) == list(range(len(sizes)))
    for bucket in plan:
        assert bucket == sorted(bucket, reverse=True)
        assert len({sizes[i][1] for i in bucket}) == 1
    for kind in "ab":
        total = sum(4 * n for n, k in sizes if k == kind)
        most = max((4 * n for n, k in sizes if k == kind), default=0)
        held = [sum(4 * sizes[i][0] for i in b) for b in plan if sizes[b[0]][1] == kind]
        assert all(size <= total / shares.count_buckets(total, limit) + most for size in held)


def test_a_parameter_much_larger_than_a_bucket_has_one_alone() -> None:
    assert shares.plan_buckets([a_parameter(2), a_parameter(99), a_parameter(2)], 80) == [
        [2],
        [1],
        [0],
    ]


def test_a_bucket_holds_one_kind() -> None:
    kinds = [a_parameter(1, "a"), a_parameter(1, "b"), a_parameter(1, "a")]
    assert shares.plan_buckets(kinds, 80) == [[2, 0], [1]]


def test_a_parameter_without_elements_has_a_bucket_too() -> None:
    assert shares.plan_buckets([a_parameter(1), a_parameter(0)], 80) == [[1, 0]]
    assert shares.plan_buckets([a_parameter(0)], 80) == [[0]]


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


MESHES = [
    (Mesh(), 1),
    (Mesh(), 3),
    (Mesh(shard=2), 1),
    (Mesh(shard=2), 2),
    (Mesh(shard=3), 2),
    (Mesh(tensor=2), 2),
    (Mesh(shard=2, tensor=2), 1),
    (Mesh(shard=3, tensor=2), 2),
]


def box_on(part: Part, divided: frozenset[str], rows: int) -> range:
    """The rows of a tensor on a rank, as `torch.chunk` cuts them: by tensor first, then by shard."""
    held = range(rows)
    for name, at, size in (
        ("tensor", part.place % part.mesh.tensor, part.mesh.tensor),
        ("shard", part.place // part.mesh.tensor, part.mesh.shard),
    ):
        if name in divided:
            each = -(-len(held) // size)
            held = held[at * each : (at + 1) * each]
    return held


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(("mesh", "units"), MESHES)
@given(rows=some.lists(some.integers(0, 9), min_size=1, max_size=6), data=some.data())
def test_every_row_of_a_divided_tensor_is_stored_once(
    mesh: Mesh, units: int, whole: bool, rows: list[int], data: some.DataObject
) -> None:
    kinds = [frozenset(), {"shard"}, {"tensor"}, {"shard", "tensor"}]
    divided = [frozenset(data.draw(some.sampled_from(kinds))) for _ in rows]
    stored: list[list[int]] = [[] for _ in rows]
    parts = [part_of(mesh, rank, units * mesh.unit) for rank in range(units * mesh.unit)]
    for part in [p.of_one_unit() for p in parts[-mesh.unit :]] if whole else parts:
        boxes = [box_on(part, d, n) for d, n in zip(divided, rows, strict=True)]
        sizes = [
            TensorSize(name=str(i), shape=(len(box), 3), item_bytes=4, divided=d)
            for i, (box, d) in enumerate(zip(boxes, divided, strict=True))
        ]
        for held in shares.plan_part(sizes, part):
            stored[int(held.name)] += boxes[int(held.name)][held.first : held.last]
    assert [sorted(found) for found in stored] == [list(range(n)) for n in rows]


def test_the_ranks_that_hold_the_same_box_share_its_bytes() -> None:
    mesh, box = Mesh(shard=2, tensor=2), TensorSize(name="w", shape=(40, 1), item_bytes=4)
    box = replace(box, divided=frozenset({"shard"}))
    stored = [shares.plan_part([box], part_of(mesh, rank, 8)) for rank in range(8)]
    assert [(r.first, r.last) for (r,) in stored] == [
        (0, 10), (10, 20), (0, 10), (10, 20), (20, 30), (30, 40), (20, 30), (30, 40),
    ]  # fmt: skip

"""Which ranks form a unit, and what each rank does."""

import pytest

from everstep_contract.units import Mesh, form_units, parse


def test_two_units_of_two_by_two() -> None:
    mesh = Mesh(shard=2, tensor=2)
    assert [mesh.unit_of(r) for r in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [mesh.place_of(r) for r in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert list(mesh.list_unit(1)) == [4, 5, 6, 7]
    assert list(mesh.list_replicas(5, 8)) == [1, 5]
    assert [mesh.data_index(r) for r in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert list(mesh.list_sharers(5, 8)) == [1, 3, 5, 7]
    assert [r for r in range(8) if mesh.counts(r)] == [0, 2, 4, 6], "one rank counts for each share"


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(shard=3), Mesh(tensor=2), Mesh(shard=2, tensor=2)])
def test_each_share_is_counted_once_and_each_rank_has_one(mesh: Mesh) -> None:
    world = 2 * mesh.unit
    counted = [mesh.data_index(r) for r in range(world) if mesh.counts(r)]
    assert counted == list(range(mesh.count_shares(world)))
    for rank in range(world):
        assert rank in mesh.list_unit(mesh.unit_of(rank))
        assert rank in mesh.list_replicas(rank, world)
        assert sorted(map(mesh.data_index, mesh.list_sharers(rank, world))) == counted


def test_a_pod_holds_a_whole_unit_or_only_a_part_of_one() -> None:
    pairs = Mesh(shard=2)
    assert [pairs.holds_unit(r) for r in ([0, 1], [0, 1, 2], [1, 2], [3])] == [
        True,
        True,
        False,
        False,
    ]
    assert Mesh().holds_unit([3])
    assert not pairs.holds_unit([])


def test_only_whole_units_count() -> None:
    assert [Mesh(shard=2).round_down(n) for n in range(5)] == [0, 0, 2, 2, 4]


@pytest.mark.parametrize(
    ("ranks", "problem"),
    [
        (4, ""),
        (3, "is not a whole number of units of 2 (shard=2): use 2 or 4"),
        (1, "is not a whole number of units of 2 (shard=2): use 2"),
    ],
)
def test_a_size_that_is_not_whole_is_told_with_those_beside_it(ranks: int, problem: str) -> None:
    assert Mesh(shard=2).why_not_whole(ranks) == problem
    assert Mesh().why_not_whole(ranks) == ""


@pytest.mark.parametrize(
    ("mesh", "ranks", "slots"),
    [
        (Mesh(), 8, 1),
        (Mesh(shard=2), 1, 2),
        (Mesh(shard=2), 8, 1),
        (Mesh(shard=4, tensor=4), 8, 2),
    ],
)
def test_a_unit_lies_on_whole_pods_or_a_pod_holds_whole_units(
    mesh: Mesh, ranks: int, slots: int
) -> None:
    assert (mesh.why_not_slots(ranks), mesh.count_slots(ranks)) == ("", slots)


def test_a_pod_that_would_hold_a_part_of_a_second_unit_is_refused() -> None:
    why = Mesh(shard=3, tensor=2).why_not_slots(4)
    assert why == (
        "a unit has 6 ranks (shard=3,tensor=2) and a pod 4: one must be a multiple of the other"
    )


def test_a_mesh_as_text() -> None:
    assert parse("shard=2,tensor=4") == Mesh(shard=2, tensor=4)
    assert parse(" tensor = 2 ") == Mesh(tensor=2)
    for mesh in (Mesh(), Mesh(shard=3), Mesh(tensor=2), Mesh(shard=2, tensor=4)):
        assert parse(str(mesh)) == mesh
    assert (str(Mesh()), str(Mesh(shard=2, tensor=4))) == ("shard=1", "shard=2,tensor=4")
    assert parse("") == Mesh()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("pipeline=2", "pipeline: not yet"),
        ("shard=2,context=2", "context: not yet"),
        ("shards=2", "'shards' is no dimension; write shard=2"),
        ("shard=0", "shard=0: give it a whole number of ranks"),
        ("shard", "shard=: give it a whole number"),
        ("shard=2,shard=2", "shard is given twice"),
    ],
)
def test_what_is_no_mesh_is_refused_with_the_fix(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse(text)


@pytest.mark.parametrize(
    ("slots", "together", "awaited", "units"),
    [
        ((3, 0, 2), 1, (1,), [(0,), (2,), (3,)]),
        ((0, 1, 2, 3), 2, (), [(0, 1), (2, 3)]),
        ((0, 2, 3), 2, (), [(2, 3)]),
        ((5, 3, 2, 0), 2, (), [(0, 5), (2, 3)]),
        ((0, 3, 4, 7), 2, (), [(0, 3), (4, 7)]),
        ((0, 3, 4, 7), 2, (1,), [(3, 4)]),
        ((0, 3, 4, 7), 2, (1, 2), [(4, 7)]),
        ((0, 1, 2, 4, 5, 6, 7, 9), 4, (), [(0, 1, 2, 9), (4, 5, 6, 7)]),
        ((0, 1, 2, 9, 10, 11), 4, (3,), []),
        ((), 2, (), []),
    ],
)
def test_neighbours_form_a_unit_first(
    slots: tuple[int, ...],
    together: int,
    awaited: tuple[int, ...],
    units: list[tuple[int, ...]],
) -> None:
    assert form_units(slots, together, awaited) == units

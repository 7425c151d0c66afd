"""Which ranks form a unit, and what each of them does."""

import pytest

from everstep_contract.units import Mesh, parse


def test_two_units_of_two_by_two() -> None:
    mesh = Mesh(shard=2, tensor=2)
    assert [mesh.unit_of(r) for r in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [mesh.place_of(r) for r in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert list(mesh.list_unit(1)) == [4, 5, 6, 7]
    assert list(mesh.list_replicas(5, 8)) == [1, 5]
    assert [mesh.data_index(r) for r in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert list(mesh.list_sharers(5, 8)) == [1, 3, 5, 7]
    assert [r for r in range(8) if mesh.counts(r)] == [0, 2, 4, 6], "one for each share"


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(shard=3), Mesh(tensor=2), Mesh(shard=2, tensor=2)])
def test_each_share_is_counted_once_and_each_rank_has_one(mesh: Mesh) -> None:
    world = 2 * mesh.unit
    counted = [mesh.data_index(r) for r in range(world) if mesh.counts(r)]
    assert counted == list(range(mesh.count_shares(world)))
    for rank in range(world):
        assert rank in mesh.list_unit(mesh.unit_of(rank))
        assert rank in mesh.list_replicas(rank, world)
        assert sorted(map(mesh.data_index, mesh.list_sharers(rank, world))) == counted


def test_only_whole_units_count() -> None:
    assert [Mesh(shard=2).round_down(n) for n in range(5)] == [0, 0, 2, 2, 4]


def test_a_mesh_as_text() -> None:
    assert parse("shard=2,tensor=4") == Mesh(shard=2, tensor=4)
    assert parse(" tensor = 2 ") == Mesh(tensor=2)
    assert parse(str(Mesh(shard=3))) == Mesh(shard=3)
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

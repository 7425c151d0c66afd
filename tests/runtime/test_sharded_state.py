"""State that a unit's ranks hold in boxes: saved by any mesh, loaded by any other and by one process."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from everstep_contract import wire
from everstep_contract.units import Mesh
from runtime.a_commit import commit
from runtime.sharded_ranks import Rank, run_ranks

SHARD_2, SHARD_3, BOTH = Mesh(shard=2), Mesh(shard=3), Mesh(shard=2, tensor=2)
Full = dict[str, torch.Tensor]


def save(rank: Rank) -> tuple[Full, Full, list[wire.Staged]]:
    """Step 2 is staged while step 3 computes, step 3 by each unit alone, and then by all, with one number changed on
    the last rank. The states of both, and what was staged.
    """
    rank.train(2)
    rank.session.settle(until=9)
    second = rank.gather()
    rank.session.stage_beside(2)
    rank.session.begin_copy()
    rank.compute()
    rank.session.end_copy()
    rank.optimizer.step()
    rank.session.copier.wait()
    third = rank.gather()
    rank.session.stage(3, whole=True)
    if rank.session.membership.rank == rank.session.membership.world - 1:
        weight: Any = rank.model.first.weight
        weight._local_tensor[0, 0] += 1
    rank.session.stage(3)
    return second, third, rank.staged()


def load(rank: Rank) -> tuple[Full, Full]:
    """What was loaded, and what a further step makes of it."""
    return rank.gather(), rank.train(1).gather()


class Saved:
    def __init__(self, folder: Path, mesh: Mesh, units: int) -> None:
        ranks: list[Any] = run_ranks(folder / "save", mesh, units * mesh.unit, save)
        self.second, self.third, _ = ranks[0]
        beside, whole, self.damaged = zip(*(staged for *_, staged in ranks), strict=True)
        assert [s.problem for s in (*beside, *whole)] == [""] * 2 * len(ranks)
        assert [s.lead for s in beside] == [rank == 0 for rank in range(len(ranks))]
        assert [s.lead for s in whole] == [mesh.place_of(r) == 0 for r in range(len(ranks))]
        assert len({s.layout for s in (*beside, *whole)}) == 1, "every rank tells the same layout"
        self.beside, self.whole = list(beside), list(whole[-mesh.unit :])
        self.folder = folder

    def commit(self, staged: list[wire.Staged]) -> dict[str, Any]:
        (self.folder / f"{staged[0].step}").mkdir()
        return commit(self.folder / f"{staged[0].step}", staged)


def list_witnesses(staged: Iterable[wire.Staged]) -> dict[int, dict[int, str]]:
    """Part → rank → what it tells of this part."""
    told: dict[int, dict[int, str]] = {}
    for rank, one in enumerate(staged):
        for own in one.digests:
            told.setdefault(own.part, {})[rank] = own.values
    return told


def assert_same(found: Full, wanted: Full) -> None:
    assert found.keys() == wanted.keys()
    assert [n for n in found if not torch.equal(found[n], wanted[n])] == []


def assert_close(found: Full, wanted: Full) -> None:
    assert all(torch.allclose(found[n], wanted[n], atol=1e-5) for n in wanted)


def test_two_units_save_and_three_shards_load(tmp_path: Path) -> None:
    saved = Saved(tmp_path, SHARD_2, 2)
    beside, whole = saved.commit(saved.beside), saved.commit(saved.whole)
    assert_same(Rank(tmp_path, Mesh(), 0, 1, None, **beside).gather(), saved.second)
    assert_same(Rank(tmp_path, Mesh(), 0, 1, None, **whole).gather(), saved.third)
    for loaded, further in run_ranks(tmp_path / "load", SHARD_3, 3, load, **beside):
        assert_same(loaded, saved.second)
        assert_close(further, saved.third)
    sound, damaged = list_witnesses(saved.beside), list_witnesses(saved.damaged)
    assert {part: sorted(ranks) for part, ranks in sound.items()} == {
        0: [0, 2], 1: [1, 3], 2: [0, 2], 3: [1, 3],
    }  # fmt: skip
    assert all(len(set(values.values())) == 1 for values in sound.values())
    differ = [part for part, values in damaged.items() if len(set(values.values())) > 1]
    assert differ in ([1], [3]), "the last rank's place, and no other"


def test_shard_by_tensor_saves_and_two_shards_load(tmp_path: Path) -> None:
    saved = Saved(tmp_path, BOTH, 1)
    said = saved.commit(saved.beside)
    assert_same(Rank(tmp_path, Mesh(), 0, 1, None, **said).gather(), saved.second)
    assert not any(s.digests for s in saved.beside), "one unit has nobody to be compared with"
    for loaded, further in run_ranks(tmp_path / "load", SHARD_2, 2, load, **said):
        assert_same(loaded, saved.second)
        assert_close(further, saved.third)


def test_one_process_saves_and_shard_by_tensor_loads(tmp_path: Path) -> None:
    rank = Rank(tmp_path, Mesh(), 0, 1, None).train(2)
    before = rank.gather()
    rank.session.stage(2)
    said = commit(tmp_path, rank.staged())
    rank.train(1)
    for loaded, further in run_ranks(tmp_path / "load", BOTH, 4, load, **said):
        assert_same(loaded, before)
        assert_close(further, rank.gather())

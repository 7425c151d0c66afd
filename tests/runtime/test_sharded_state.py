"""Sharded state: saved with any mesh, loaded with any other and in one process."""

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from everstep.errors import StateError
from everstep.sharded import is_sharded, local_of
from everstep.shares import part_of
from everstep.staging import lay_out
from everstep.transfer import Taken
from everstep_contract import wire
from everstep_contract.units import Mesh
from runtime.a_commit import commit
from runtime.sharded_ranks import Launcher, Rank, form_mesh

SHARD_2, SHARD_3, BOTH = Mesh(shard=2), Mesh(shard=3), Mesh(shard=2, tensor=2)
Full = dict[str, torch.Tensor]


def save(rank: Rank) -> tuple[Full, Full, list[wire.Staged]]:
    """Stage step 2 while step 3 computes; step 3 by each unit alone; then by all ranks, with one number changed on the
    last rank. Return the states after both steps, and what was staged.
    """
    rank.train(2)
    rank.session.settle(until=9)
    second = rank.gather()
    rank.session.saves.stage_beside(2)
    rank.session.saves.begin_copy()
    rank.compute()
    rank.session.saves.end_copy()
    rank.optimizer.step()
    rank.session.saves.copier.wait()
    third = rank.gather()
    rank.session.saves.stage(3, whole=True)
    if rank.session.membership.rank == rank.session.membership.world - 1:
        weight: Any = rank.model.first.weight
        weight._local_tensor[0, 0] += 1
    rank.session.saves.stage(3)
    return second, third, rank.staged()


def load(rank: Rank) -> tuple[Full, Full]:
    """Return the loaded state, and the state after a further step."""
    return rank.gather(), rank.train(1).gather()


class Saved:
    def __init__(self, launcher: Launcher, folder: Path, mesh: Mesh, units: int) -> None:
        ranks: list[Any] = launcher.run(folder / "save", mesh, units * mesh.unit, save)
        self.second, self.third, _ = ranks[0]
        beside, whole, self.damaged = zip(*(staged for *_, staged in ranks), strict=True)
        assert [s.problem for s in (*beside, *whole)] == [""] * 2 * len(ranks)
        assert [s.lead for s in beside] == [rank == 0 for rank in range(len(ranks))]
        assert [s.lead for s in whole] == [mesh.place_of(r) == 0 for r in range(len(ranks))]
        assert len({s.layout for s in (*beside, *whole)}) == 1, "ranks report different layouts"
        self.beside, self.whole = list(beside), list(whole[-mesh.unit :])
        self.folder = folder

    def commit(self, staged: list[wire.Staged]) -> dict[str, Any]:
        (self.folder / f"{staged[0].step}").mkdir()
        return commit(self.folder / f"{staged[0].step}", staged)


def list_witnesses(staged: Iterable[wire.Staged]) -> dict[int, dict[int, str]]:
    """Part → rank → the digests that it reports of this part."""
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


def test_two_units_save_and_three_shards_load(launcher: Launcher, tmp_path: Path) -> None:
    saved = Saved(launcher, tmp_path, SHARD_2, 2)
    beside, whole = saved.commit(saved.beside), saved.commit(saved.whole)
    assert_same(Rank(tmp_path, Mesh(), 0, 1, None, **beside).gather(), saved.second)
    assert_same(Rank(tmp_path, Mesh(), 0, 1, None, **whole).gather(), saved.third)
    for loaded, further in launcher.run(tmp_path / "load", SHARD_3, 3, load, **beside):
        assert_same(loaded, saved.second)
        assert_close(further, saved.third)
    sound, damaged = list_witnesses(saved.beside), list_witnesses(saved.damaged)
    assert {part: sorted(ranks) for part, ranks in sound.items()} == {
        0: [0, 2], 1: [1, 3], 2: [0, 2], 3: [1, 3],
    }  # fmt: skip
    assert all(len(set(values.values())) == 1 for values in sound.values())
    differ = [part for part, values in damaged.items() if len(set(values.values())) > 1]
    assert differ in ([1], [3]), "only the last rank's place may differ"


def test_shard_by_tensor_saves_and_two_shards_load(launcher: Launcher, tmp_path: Path) -> None:
    saved = Saved(launcher, tmp_path, BOTH, 1)
    said = saved.commit(saved.beside)
    assert_same(Rank(tmp_path, Mesh(), 0, 1, None, **said).gather(), saved.second)
    assert not any(s.digests for s in saved.beside), "a single unit has no replica to compare with"
    for loaded, further in launcher.run(tmp_path / "load", SHARD_2, 2, load, **said):
        assert_same(loaded, saved.second)
        assert_close(further, saved.third)


def test_one_process_saves_and_shard_by_tensor_loads(launcher: Launcher, tmp_path: Path) -> None:
    rank = Rank(tmp_path, Mesh(), 0, 1, None).train(2)
    before = rank.gather()
    rank.session.saves.stage(2)
    said = commit(tmp_path, rank.staged())
    rank.train(1)
    for loaded, further in launcher.run(tmp_path / "load", BOTH, 4, load, **said):
        assert_same(loaded, before)
        assert_close(further, rank.gather())


def refuse(rank: Rank) -> list[str]:
    """Return the errors for DTensors that no checkpoint can hold."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Shard

    own = form_mesh(SHARD_2, 2)["shard"]
    other = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    cases = [
        (own, Partial(), Mesh(shard=2)),
        (other, Shard(0), Mesh(shard=2)),
        (own, Shard(0), Mesh(shard=4)),
    ]
    said = []
    for device_mesh, placement, mesh in cases:
        made = DTensor.from_local(torch.ones(2, 2), device_mesh, [placement])
        with pytest.raises(StateError) as caught:
            lay_out({"ema/shadow": made}, part_of(mesh, 0, mesh.unit))
        said.append(str(caught.value))
    rank.session.track_local({"own": Held(made)})
    with pytest.raises(StateError) as caught:
        rank.session.capture()
    return [*said, str(caught.value)]


class Held:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def state_dict(self) -> dict[str, Any]:
        return {"tensor": self.tensor}

    def load_state_dict(self, value: dict[str, Any]) -> None:
        self.tensor = value["tensor"]


def test_what_no_checkpoint_can_hold_is_refused_by_name(launcher: Launcher, tmp_path: Path) -> None:
    said, _ = launcher.run(tmp_path / "ranks", SHARD_2, 2, refuse)
    assert all(text.startswith("ema/shadow: cannot store it: ") for text in said[:3])
    assert "each rank holds a term of a sum. Call .redistribute()" in said[0]
    assert "the mesh dimension 'dp' of 2 ranks; divide it over job.mesh" in said[1]
    assert "over 2 ranks of shard, and the job's units have shard=4" in said[2]
    assert said[3].startswith("own/tensor: a DTensor belongs to several ranks")


def average(rank: Rank) -> dict[str, torch.Tensor]:
    """Track a user's object that holds DTensors, and save or load it."""
    shadow: Any = rank.model.first.weight
    held = Held(shadow.detach() * 0)
    if rank.session.checkpoint is None:
        held.tensor = shadow.detach() * 3
    rank.session.track({"ema": held})
    kinds = type(held.tensor) is type(shadow)
    full: Any = held.tensor
    found = {"ema": full.full_tensor(), "same": torch.tensor(kinds)}
    rank.session.saves.stage(1)
    return {**found, "staged": rank.staged()[-1]}  # type: ignore[dict-item]


def test_an_object_of_the_scripts_own_gets_dtensors_back(
    launcher: Launcher, tmp_path: Path
) -> None:
    saved: list[Any] = launcher.run(tmp_path / "save", SHARD_2, 2, average)
    said = commit(tmp_path, [one["staged"] for one in saved])
    for one in launcher.run(tmp_path / "load", SHARD_3, 3, average, **said):
        assert one["same"]
        assert torch.equal(one["ema"], saved[0]["ema"])


def adopt(rank: Rank, *, parts: bool) -> tuple[Full, Full, Full, Full]:
    """Adopt state as a newcomer. With `parts`, the giver's tensors are sharded as well and it says which."""
    rank.train(2)
    held, before = rank.session.capture(), rank.gather()
    sent = {name: local_of(t).clone() for name, t in held.tensors.items()}
    divided = frozenset(n for n, t in held.tensors.items() if is_sharded(t) and parts)
    after = rank.train(1).gather()
    rank.session.adopt(Taken(applied=2, tree=held.tree, tensors=sent, parts=divided))
    return before, rank.gather(), after, rank.train(1).gather()


@pytest.mark.parametrize(
    ("mesh", "parts"), [(Mesh(), False), (Mesh(), True), (SHARD_3, True)], ids=str
)
def test_a_newcomer_takes_the_state_of_a_rank_of_its_place(
    launcher: Launcher, tmp_path: Path, mesh: Mesh, parts: bool
) -> None:
    for before, adopted, after, again in launcher.run(
        tmp_path / "ranks", mesh, mesh.unit, partial(adopt, parts=parts)
    ):
        assert_same(adopted, before)
        assert_same(again, after)

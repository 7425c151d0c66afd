"""Copies in memory that is allocated once and reused."""

import os
from pathlib import Path

import pytest
import torch

from everstep.shares import Part
from everstep.slots import COUNT, Slots
from everstep.staging import NoRoom, lay_out


def some_tensors(elements: int = 1000, value: float = 1.0) -> dict[str, torch.Tensor]:
    return {
        "a": torch.full((elements,), value),
        "b": torch.full((elements, 3), value + 1).t(),  # not contiguous
        "c": torch.tensor(value, dtype=torch.bfloat16),
        "d": torch.empty(0, 4),
    }


def read_tensor(path: Path, found: object, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    raw = bytearray(path.read_bytes())
    like = tensors[found.name]  # type: ignore[attr-defined]
    at, size = found.at, like.numel() * like.element_size()  # type: ignore[attr-defined]
    return torch.frombuffer(raw[at : at + size], dtype=like.dtype).reshape(like.shape)


def inodes(folder: Path) -> set[int]:
    return {path.stat().st_ino for path in folder.glob("slot-*")}


def test_a_save_holds_every_tensor_bit_for_bit(tmp_path: Path) -> None:
    tensors = some_tensors()
    staged, _ = Slots(str(tmp_path), "slot-").write(str(tmp_path / "save"), tensors, Part())
    assert [s.name for s in staged] == list(tensors)
    for found in staged:
        if 0 not in found.shape:
            held = read_tensor(tmp_path / "save", found, tensors)
            assert torch.equal(held, tensors[found.name])


def test_the_first_save_finds_its_memory_prepared_and_later_ones_use_it_again(
    tmp_path: Path,
) -> None:
    slots, tensors = Slots(str(tmp_path), "slot-"), some_tensors()
    slots.prepare(lay_out(tensors, Part())[1])
    prepared = inodes(tmp_path)
    assert len(prepared) == COUNT
    for step in range(5):
        save = tmp_path / f"save-{step}"
        slots.write(str(save), some_tensors(value=float(step)), Part())
        assert save.stat().st_ino in prepared
        assert torch.frombuffer(bytearray(save.read_bytes()[:4]), dtype=torch.float32) == step
        save.unlink()
    assert inodes(tmp_path) == prepared


def test_a_rank_that_trains_no_more_gives_the_memory_back(tmp_path: Path) -> None:
    slots, tensors = Slots(str(tmp_path), "slot-"), some_tensors()
    slots.prepare(lay_out(tensors, Part())[1])
    slots.write(str(tmp_path / "save"), tensors, Part())
    slots.release()
    assert inodes(tmp_path) == {(tmp_path / "save").stat().st_ino}, "a save keeps its own"


def test_what_is_still_uploaded_is_never_written_over(tmp_path: Path) -> None:
    slots = Slots(str(tmp_path), "slot-")
    saves = [tmp_path / f"save-{n}" for n in range(COUNT + 1)]
    for number, save in enumerate(saves[:COUNT]):
        slots.write(str(save), some_tensors(value=float(number)), Part())
    before = [save.read_bytes() for save in saves[:COUNT]]
    with pytest.raises(NoRoom, match="still wait for the store"):
        slots.write(str(saves[COUNT]), some_tensors(value=9.0), Part())
    assert [save.read_bytes() for save in saves[:COUNT]] == before
    saves[0].unlink()
    slots.write(str(saves[COUNT]), some_tensors(value=9.0), Part())
    assert saves[1].read_bytes() == before[1]


def test_a_larger_part_gets_a_larger_slot(tmp_path: Path) -> None:
    slots = Slots(str(tmp_path), "slot-")
    slots.prepare(100)
    tensors = some_tensors(50_000)
    for number in range(COUNT):
        save = tmp_path / f"save-{number}"
        slots.write(str(save), tensors, Part())
    sizes = [slot.stat().st_size for slot in tmp_path.glob("slot-*")]
    assert sizes == [lay_out(tensors, Part())[1]] * COUNT, "slots that are too small must be freed"


def test_a_save_outlives_the_slots_name(tmp_path: Path) -> None:
    """The agent removes a dead worker's slots, but keeps a save that it still uploads."""
    Slots(str(tmp_path), "slot-").write(str(tmp_path / "save"), some_tensors(), Part())
    for path in tmp_path.glob("slot-*"):
        os.unlink(path)
    assert (tmp_path / "save").stat().st_size > 0

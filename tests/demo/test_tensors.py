"""Checkpoints are compared by the bytes of each tensor, not by its pieces."""

from dataclasses import replace
from pathlib import Path

import numpy
import pytest

from agent.a_run import COLUMNS, ROWS, ARun, content
from everstep_agent.storage import open_store
from everstep_contract.manifest import Piece, Tensor
from everstep_demo.tensors import Checkpoint, Value, build_value, list_differences, load_newest

W = Value(dtype="float32", shape=(2, 3), bytes=bytes(24))
HELD = Checkpoint(step=7, tensors={"w": W}, state={"lr": 0.5})


async def test_the_newest_checkpoint_is_read_whole_from_the_pieces_of_all_ranks(
    tmp_path: Path,
) -> None:
    run = ARun(open_store(f"file://{tmp_path}", "ns/job", {}), tmp_path)
    await run.claim(1)
    await run.save(2)
    await run.save(4, since=2)
    found = await load_newest(run.store)
    assert found.step == 4
    assert found.tensors["w"] == Value(dtype="float32", shape=(ROWS, COLUMNS), bytes=content(4))
    assert found.tensors["b"].bytes == (4).to_bytes(8, "little")


def test_a_box_of_columns_comes_to_its_place() -> None:
    whole = numpy.arange(12, dtype="<i4").reshape(3, 4)
    chunks = {"left": whole[:, :1].tobytes(), "right": b"pad!" + whole[:, 1:].tobytes()}
    pieces = (
        Piece(offsets=(0, 1), lengths=(3, 3), chunk="right", at=4),
        Piece(offsets=(0, 0), lengths=(3, 1), chunk="left", at=0),
    )
    tensor = Tensor(name="w", dtype="int32", shape=(3, 4), pieces=pieces)
    assert build_value(tensor, chunks).bytes == whole.tobytes()
    with pytest.raises(AssertionError, match="do not cover the whole tensor"):
        build_value(replace(tensor, pieces=pieces[:1]), chunks)


def test_checkpoints_that_are_equal_differ_in_nothing() -> None:
    assert list_differences(HELD, HELD) == []


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (replace(HELD, step=8), "step 7 instead of 8"),
        (replace(HELD, tensors={"w": replace(W, bytes=bytes(23) + b"x")}), "w: other values"),
        (replace(HELD, tensors={"w": replace(W, shape=(3, 2))}), "w: float32 (2, 3) instead of"),
        (replace(HELD, tensors={}), "w: only in one of the two checkpoints"),
        (replace(HELD, state={"lr": 0.25}), "the state that is not a tensor differs"),
    ],
)
def test_a_difference_is_named(other: Checkpoint, said: str) -> None:
    (found,) = list_differences(HELD, other)
    assert said in found

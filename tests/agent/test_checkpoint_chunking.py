import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep_agent.checkpoint.chunking import ALIGN, BadStaging, plan_chunks
from everstep_contract.manifest import ITEM_BYTES
from everstep_contract.wire import StagedTensor


def staged(
    shape: tuple[int, ...], *, dtype: str = "float32", at: int = 0, **more: Any
) -> StagedTensor:
    values = {"offsets": (0,) * len(shape), "lengths": shape} | more
    return StagedTensor(name=f"t{at}", dtype=dtype, shape=shape, at=at, **values)


@st.composite
def files(draw: st.DrawFn) -> tuple[list[StagedTensor], int]:
    tensors, at = [], 0
    for _ in range(draw(st.integers(0, 6))):
        dtype = draw(st.sampled_from(["float64", "float32", "bfloat16", "int8"]))
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        divided = draw(st.sampled_from(["", "shard"]))
        tensors.append(staged(shape, dtype=dtype, at=at, divided=divided))
        size = math.prod(shape) * ITEM_BYTES[dtype]
        at += size + (-size % ALIGN) + ALIGN * (size == 0)
    return tensors, at


@given(files(), st.sampled_from([128, 192, 320, 1024]))
def test_every_element_lies_in_one_box_of_one_chunk(
    file: tuple[list[StagedTensor], int], limit: int
) -> None:
    tensors, size = file
    plans = plan_chunks(tensors, size, limit)
    for plan in plans:
        assert plan.start % ALIGN == 0
        assert 0 < plan.end - plan.start <= limit
        for box in plan.boxes:
            assert plan.start <= box.start < box.end <= plan.end
            assert (box.start - plan.start) % ITEM_BYTES[box.dtype] == 0
    boxes = [b for p in plans for b in p.boxes]
    for tensor in tensors:
        mine = sorted((b.start, b.end, b.lengths) for b in boxes if b.name == tensor.name)
        whole = math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype]
        edges = [tensor.at, *(end for _, end, _ in mine)]
        assert [start for start, _, _ in mine] == edges[:-1]
        assert edges[-1] == tensor.at + whole


def test_what_all_ranks_load_shares_no_chunk_with_what_only_some_load() -> None:
    """Else each pod would bring a chunk of every other rank for a few bytes."""
    kinds = ["shard", "shard", "", "", "shard,tensor"]
    tensors = [staged((4,), at=64 * n, divided=kind) for n, kind in enumerate(kinds)]
    plans = plan_chunks(tensors, 64 * len(kinds), 1024)
    assert [[box.name for box in plan.boxes] for plan in plans] == [
        ["t0", "t64"],
        ["t128", "t192"],
        ["t256"],
    ]


def test_small_tensors_share_a_chunk_and_large_ones_are_cut_by_rows() -> None:
    tensors = [staged((4,), at=0), staged((4,), at=64), staged((100, 16), at=128)]
    plans = plan_chunks(tensors, 128 + 6400, 1024)
    assert len(plans[0].boxes) == 2
    rows = [b.lengths for p in plans[1:] for b in p.boxes]
    assert sum(r for r, _ in rows) == 100
    assert all(c == 16 for _, c in rows)


def test_one_row_longer_than_a_chunk_is_cut_along_the_next_dimension() -> None:
    plans = plan_chunks([staged((2, 1000))], 8000, 1024)
    assert all(p.end - p.start <= 1024 for p in plans)
    assert {b.lengths[0] for p in plans for b in p.boxes} == {1}


def test_a_share_keeps_its_place_in_the_whole_tensor() -> None:
    (plan,) = plan_chunks([staged((8, 4), offsets=(6, 0), lengths=(2, 4))], 32)
    assert [(b.offsets, b.lengths) for b in plan.boxes] == [((6, 0), (2, 4))]


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (staged((4,), dtype="quaternion"), "unknown dtype 'quaternion'"),
        (staged((4,), at=8), "ends at byte 24 of a file of 16"),
        (staged((4,), at=-4), "tensor t-4"),
        (staged((4,), offsets=(2,)), "outside (4,)"),
        (staged((4,), lengths=(4, 1)), "outside (4,)"),
    ],
)
def test_a_staged_file_that_does_not_hold_what_it_says_is_refused(
    tensor: StagedTensor, said: str
) -> None:
    with pytest.raises(BadStaging) as caught:
        plan_chunks([tensor], 16)
    assert said in str(caught.value)

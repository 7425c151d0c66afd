"""Digests of the state, by which replicas are compared."""

import base64

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from everstep import digests, staging, state
from everstep.shares import part_of
from everstep_contract.units import ONE_RANK, Mesh


def some_state() -> state.Tensors:
    return {
        "model/a": torch.arange(35, dtype=torch.float32).reshape(7, 5),
        "model/b": torch.arange(13, dtype=torch.uint8),
        "model/none": torch.zeros(0, 4),
        "model/one": torch.tensor(3.5, dtype=torch.float64),
        "random/torch": torch.arange(50, dtype=torch.uint8),
    }


@pytest.mark.parametrize("world", [2, 3, 5])
def test_each_part_has_up_to_three_witnesses_and_they_agree(world: int) -> None:
    told: dict[int, list[str]] = {}
    for rank in range(world):
        for own in digests.tell(some_state(), part_of(ONE_RANK, rank, world)):
            told.setdefault(own.part, []).append(own.values)
    assert set(told) == set(range(world))
    assert {len(values) for values in told.values()} == {min(3, world)}
    assert all(len(set(values)) == 1 for values in told.values())


@pytest.mark.parametrize("name", ["model/a", "model/b", "model/one"])
def test_one_flipped_bit_changes_the_digests_of_one_part(name: str) -> None:
    flipped = some_state()
    flipped[name].numpy().reshape(-1).view(np.uint8)[-1] ^= 4
    changed = [
        sound.part
        for sound, odd in zip(
            digests.tell(some_state(), part_of(ONE_RANK, 0, 3)),
            digests.tell(flipped, part_of(ONE_RANK, 0, 3)),
            strict=True,
        )
        if sound.values != odd.values
    ]
    assert len(changed) == 1


def test_a_digest_for_each_tensor_that_has_bytes_and_that_ranks_share() -> None:
    laid = [staging.lay_out(some_state(), part_of(ONE_RANK, part, 2))[0] for part in (0, 1)]
    for told, rows in zip(digests.tell(some_state(), part_of(ONE_RANK, 0, 2)), laid, strict=True):
        names = [r.rows.name for r in rows if r.bytes and not r.rows.name.startswith("random/")]
        assert len(base64.b64decode(told.values)) == 8 * len(names)


def test_a_rank_that_is_alone_tells_none() -> None:
    assert digests.tell(some_state(), part_of(ONE_RANK, 0, 1)) == ()


@given(raw=some.binary(max_size=100), first=some.integers(0, 9))
def test_a_sum_is_that_of_the_bytes_as_words(raw: bytes, first: int) -> None:
    tensor = torch.frombuffer(bytearray(raw) or bytearray(1), dtype=torch.uint8)[: len(raw)][first:]
    data = tensor.numpy().tobytes()
    words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]
    assert digests.sum_all([tensor]) == [sum(words) % 2**64]


def test_a_tensor_that_is_not_contiguous_has_the_sum_of_its_copy() -> None:
    tensor = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    assert digests.sum_all([tensor.t()]) == digests.sum_all([tensor.t().contiguous()])


@pytest.mark.parametrize("units", [1, 2, 4])
def test_units_are_compared_place_by_place(units: int) -> None:
    mesh, told = Mesh(shard=2), dict[int, list[int]]()
    for rank in range(2 * units):
        for own in digests.tell(some_state(), part_of(mesh, rank, 2 * units)):
            told.setdefault(own.part, []).append(rank)
    if units == 1:
        assert told == {}
    else:
        assert set(told) == set(range(2 * units)), "a part is not compared"
        assert {len(ranks) for ranks in told.values()} == {min(3, units)}
        assert all({r % 2 for r in ranks} == {part % 2} for part, ranks in told.items())

"""Which ranks' state differs from the majority's, and in which tensors."""

import base64
import struct

from everstep_agent.checkpoint.parts import Part
from everstep_agent.checkpoint.replicas import find_difference
from everstep_contract.manifest import Piece, Tensor
from everstep_contract.wire import PartDigests

PIECE = Piece(offsets=(0,), lengths=(4,), chunk="d", at=0)


def told(part: int, *values: int) -> PartDigests:
    raw = struct.pack(f"<{len(values)}Q", *values)
    return PartDigests(part=part, values=base64.b64encode(raw).decode())


def a_save(world: int, damaged: dict[tuple[int, int], int] | None = None) -> list[Part]:
    """Part p has the tensors p.a and p.b with the digests 10 and 20. `damaged` maps (rank, part) to
    the digest that this rank reports of that part's b instead.
    """
    damaged = damaged or {}
    return [
        Part(
            epoch=1,
            step=10,
            rank=rank,
            tensors=(
                Tensor(name="random/torch", dtype="uint8", shape=(4,), pieces=(PIECE,)),
                Tensor(name=f"{rank}.a", dtype="float32", shape=(4,), pieces=(PIECE,)),
                Tensor(name=f"{rank}.b", dtype="float32", shape=(4,), pieces=(PIECE,)),
                Tensor(name=f"{rank}.empty", dtype="float32", shape=(0,), pieces=()),
            ),
            digests=tuple(
                told(p, 10, damaged.get((rank, p), 20))
                for p in ((rank + i) % world for i in range(min(3, world)))
            ),
        )
        for rank in range(world)
    ]


def test_equal_replicas_agree() -> None:
    assert find_difference(a_save(4)) is None


def test_a_majority_names_the_odd_rank_and_the_tensor() -> None:
    found = find_difference(a_save(4, {(2, 3): 21}))
    assert found is not None
    assert (found.tensors, found.ranks) == (("3.b",), (2,))
    assert found.describe() == "rank 2 differs from the others in 3.b"


def test_a_rank_that_stores_a_damaged_part_is_named_by_its_witnesses() -> None:
    found = find_difference(a_save(4, {(1, 1): 21}))
    assert found is not None
    assert found.ranks == (1,)


def test_two_ranks_have_no_majority() -> None:
    found = find_difference(a_save(2, {(1, 0): 21}))
    assert found is not None
    assert found.ranks == ()
    assert found.describe() == "the ranks differ in 0.b, and there is no majority"


def test_if_one_tensor_has_no_majority_nobody_is_named() -> None:
    found = find_difference(a_save(3, {(1, 0): 21, (2, 0): 22, (1, 1): 23}))
    assert found is not None
    assert found.ranks == ()
    assert set(found.tensors) == {"0.b", "1.b"}


def test_a_save_of_an_older_runtime_tells_nothing() -> None:
    parts = [Part(epoch=1, step=10, rank=rank) for rank in range(3)]
    assert find_difference(parts) is None


def test_digests_that_cannot_be_read_are_passed_over() -> None:
    broken = Part(epoch=1, step=10, rank=0, digests=(PartDigests(part=0, values="?"),))
    assert find_difference([broken]) is None

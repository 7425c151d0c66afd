"""State that a newcomer already has is found by its bytes."""

import pytest
import torch

from everstep import held_already

LARGE = held_already.LEAST_BYTES // 4


def a_tensor(seed: int = 0) -> torch.Tensor:
    return torch.rand(LARGE, generator=torch.Generator().manual_seed(seed))


def test_only_large_tensors_that_are_not_trained_are_told() -> None:
    trained, frozen = a_tensor(), a_tensor()
    tensors = {
        "model/trained": trained.detach(),
        "model/frozen": frozen,
        "model/small": a_tensor()[:-1],
        "model/turned": torch.zeros(2, LARGE).t(),
    }
    assert set(held_already.tell(tensors, [trained])) == {"model/frozen"}


def test_the_largest_are_told_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_already, "MOST", 1)
    tensors = {"a": a_tensor(), "b": torch.cat([a_tensor(), a_tensor()]), "c": a_tensor()}
    assert set(held_already.tell(tensors, [])) == {"b"}


def test_what_is_the_same_is_found_whatever_its_version() -> None:
    told = held_already.tell({"same": a_tensor(), "changed": a_tensor(), "gone": a_tensor()}, [])
    mine = {"same": a_tensor().mul_(1.0), "changed": a_tensor()}
    mine["changed"].data[7] += 1.0
    assert held_already.find(mine, told) == {"same"}


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(LARGE, dtype=torch.int32),
        torch.zeros(2, LARGE // 2),
        torch.zeros(2, LARGE // 2).t(),
        torch.zeros(LARGE + 1),
    ],
    ids=["another dtype", "another shape", "another order", "longer"],
)
def test_the_same_bytes_in_another_form_are_not_the_same(other: torch.Tensor) -> None:
    told = held_already.tell({"a": torch.zeros(LARGE)}, [])
    assert held_already.find({"a": other}, told) == set()
    assert held_already.find({"a": torch.zeros(LARGE)}, told) == {"a"}

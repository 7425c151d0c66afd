"""Sums of gradients as fixed-point integers: the functions alone, and through the reducer."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep import fixed_point
from everstep.errors import Misuse


def total(parts: list[torch.Tensor], micro_batches: int) -> torch.Tensor:
    return torch.stack([fixed_point.to_fixed(p, micro_batches)[0] for p in parts]).sum(0)


@settings(max_examples=50)
@given(st.integers(1, 40), st.integers(0, 2**31), st.randoms(use_true_random=False))
def test_the_sum_is_the_same_in_every_order_and_close_to_the_true_one(count, seed, chance):
    random = torch.Generator().manual_seed(seed)
    size = 2.0 ** (20 - 2 * (count - 1).bit_length())
    parts = [(torch.rand(5, generator=random) * 2 - 1) * size for _ in range(count)]
    found = fixed_point.from_fixed(total(parts, count), count)
    shuffled = chance.sample(parts, count)
    assert torch.equal(found, fixed_point.from_fixed(total(shuffled, count), count))
    true = torch.stack(parts).double().sum(0)
    assert (found - true).abs().max() <= count * 2.0 ** -(fixed_point.FRACTION + 1)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("count", [1, 2, 7, 64])
def test_a_gradient_that_is_not_finite_makes_the_sum_nan_however_many_there_are(value, count):
    bad = torch.tensor([1.0, value])
    good = torch.full((2,), -(2.0 ** (20 - 2 * (count - 1).bit_length())))
    for parts in ([bad] + [good] * (count - 1), [bad] * count):
        assert fixed_point.from_fixed(total(parts, count), count).isnan().all()


def test_a_gradient_that_does_not_fit_is_named_with_the_limit():
    with pytest.raises(Misuse, match=r"gradient of layer\.weight is 4097.*16 micro-batches.*4096"):
        require(-4097.0, 16)
    require(-4096.0, 16)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_gradient_that_is_not_finite_is_not_refused(value: float):
    """A GradScaler skips the step."""
    require(value, 16)


def require(value: float, micro_batches: int) -> None:
    fixed, largest = fixed_point.to_fixed(torch.tensor([1.0, value]), micro_batches)
    assert fixed.shape == (2,)
    fixed_point.require_fit({"layer.weight": largest}, micro_batches)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_gradient_is_rounded_as_in_double_precision(dtype: torch.dtype):
    parts = torch.randn(1000, dtype=torch.float64) * 10.0 ** torch.randint(-14, 3, (1000,))
    gradient = parts.to(dtype)
    fixed, largest = fixed_point.to_fixed(gradient, 16)
    expected = torch.round(gradient.double() * 2.0**fixed_point.FRACTION).to(torch.int64)
    assert torch.equal(fixed, expected)
    assert float(largest) == float(gradient.abs().max())


def test_an_empty_gradient_has_an_empty_sum():
    assert fixed_point.from_fixed(total([torch.zeros(0, 3)], 1), 1).shape == (0, 3)

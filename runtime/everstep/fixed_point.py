"""Gradients as fixed-point integers: their sum is the same in whatever order, and by
whatever ranks, they are added.

The gradient of a micro-batch becomes whole multiples of 2**-40 in int64. Of the 63 bits, b hold the
carry of 2**b micro-batches, so values up to 2**(20 - 2b) fit; larger ones are refused. A gradient
with NaN or infinity becomes a mark that survives the addition and is read back as NaN.
"""

import torch

from everstep.errors import Misuse

FRACTION = 40
"""Bits of the fraction: values are rounded to multiples of 9e-13."""


def to_fixed(gradient: torch.Tensor, micro_batches: int, name: str) -> torch.Tensor:
    """Convert to int64, in the shape of `gradient`. Raises `Misuse`, which
    contains the parameter's `name`.
    """
    largest = gradient.abs().max().item() if gradient.numel() else 0.0
    limit = 2.0 ** (60 - FRACTION - 2 * _carry(micro_batches))
    if largest > limit and largest != float("inf"):
        raise Misuse(
            f"exact_reduction: a gradient of {name} is {largest:g}, the limit with {micro_batches} "
            f"micro-batches a step is {limit:g}; clip the loss, or use exact_reduction=False"
        )
    if not largest <= limit:
        return torch.full_like(gradient, _mark(micro_batches), dtype=torch.int64)
    return torch.round(gradient.double() * 2.0**FRACTION).to(torch.int64)


def from_fixed(total: torch.Tensor, micro_batches: int) -> torch.Tensor:
    """Convert to float64; NaN where a micro-batch's gradient was not finite."""
    values = total.double() * 2.0**-FRACTION
    return values.masked_fill_(total >= _mark(micro_batches) // 2, float("nan"))


def _carry(micro_batches: int) -> int:
    return (micro_batches - 1).bit_length()


def _mark(micro_batches: int) -> int:
    return 1 << (62 - _carry(micro_batches))

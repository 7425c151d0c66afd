"""Gradients as fixed-point integers: their sum is the same in whatever order, and by
whatever ranks, they are added.

The gradient of a micro-batch becomes whole multiples of 2**-40 in int64. Of the 63 bits, b hold the
carry of 2**b micro-batches, so values up to 2**(20 - 2b) fit; larger ones are refused. A gradient
with NaN or infinity becomes a mark that survives the addition and is read back as NaN.
"""

import math
from collections.abc import Mapping

import torch

from everstep.device import read_numbers
from everstep.errors import Misuse

FRACTION = 40
"""Bits of the fraction: values are rounded to multiples of 9e-13."""


def to_fixed(gradient: torch.Tensor, micro_batches: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert to int64, in the shape of `gradient`. Also returns the largest magnitude, for
    `require_fit`, in a tensor without dimensions: nothing here waits for a device.
    """
    # Multiplied by a power of two, a float32 is as exact as a float64 would be.
    wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
    largest = _find_largest(wide)
    fixed = (wide * 2.0**FRACTION).round_().to(torch.int64)
    fits = largest <= _limit(micro_batches)
    if not (fits.is_cpu and fits):
        fixed.masked_fill_(~fits, _mark(micro_batches))
    return fixed, largest


def require_fit(largest: Mapping[str, torch.Tensor], micro_batches: int) -> None:
    """Raises `Misuse`, which contains the parameter's name, for a finite gradient that is too large.

    Args:
        largest: Parameter name → the largest magnitude in its gradient.
    """
    limit = _limit(micro_batches)
    for name, value in zip(largest, read_numbers(list(largest.values())), strict=True):
        if limit < value < math.inf:
            raise Misuse(
                f"exact_reduction: a gradient of {name} is {value:g}, the limit with {micro_batches} "
                f"micro-batches a step is {limit:g}; clip the loss, or use exact_reduction=False"
            )


def from_fixed(total: torch.Tensor, micro_batches: int, factor: float = 1.0) -> torch.Tensor:
    """Convert to float64, and multiply; NaN where a micro-batch's gradient was not finite."""
    values = total.double().mul_(factor * 2.0**-FRACTION)
    least = _mark(micro_batches) // 2
    if total.is_cpu and total.numel() and total.max() < least:
        return values
    return values.masked_fill_(total >= least, math.nan)


def _find_largest(gradient: torch.Tensor) -> torch.Tensor:
    """The largest magnitude, [] on the same device; NaN if there is one."""
    if not gradient.numel():
        return gradient.new_zeros(())
    low, high = gradient.aminmax()
    return torch.maximum(high, -low)


def _limit(micro_batches: int) -> float:
    return 2.0 ** (60 - FRACTION - 2 * _carry(micro_batches))


def _carry(micro_batches: int) -> int:
    return (micro_batches - 1).bit_length()


def _mark(micro_batches: int) -> int:
    return 1 << (62 - _carry(micro_batches))

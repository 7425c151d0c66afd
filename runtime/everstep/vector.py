"""The vector that is reduced last: what every rank must know about the
global step, as float64. Pure.

One rank computes each micro-batch and all others add zeros, so the sums are the values, whatever
the number of ranks. A rank that holds the vector's sum knows that every member's gradients are in
the reduced gradients.
"""

import functools
import itertools
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes of the parts, in their order in the vector."""

    micro_batches: int
    samples: int
    parameters: int
    buffers: int
    """Numbers that hold the bits of the small buffers (`buffers.py`)."""

    @property
    def size(self) -> int:
        return sum(self.sizes)

    @property
    def sizes(self) -> tuple[int, ...]:
        m = self.micro_batches
        return (m, m, m, m, 1, 2, self.samples, self.parameters, self.buffers)

    def parts(self, numbers: Numbers) -> "Parts":
        """Views of `numbers`, shape [size]: filling them fills the vector."""
        return Parts(*(numbers[part] for part in _list_slices(self)))


@functools.cache
def _list_slices(layout: Layout) -> list[slice]:
    ends = list(itertools.accumulate(layout.sizes))
    return [slice(end - size, end) for end, size in zip(ends, layout.sizes, strict=True)]


@dataclass(frozen=True, slots=True)
class Parts:
    counts: Numbers
    """[micro-batches] number of ranks that computed it"""
    weights: Numbers
    losses: Numbers
    scales: Numbers
    """Scale of the GradScaler with which the gradient was made; 1 without one. 0: the batch has no
    gradient, because it was skipped.
    """
    draw: Numbers
    """[1] A number that stands for the feed and the place from which a rank draws, once for each
    micro-batch.
    """
    saves: Numbers
    """[2] How many micro-batches come from ranks whose script called `job.save` in the step before, and
    from ranks whose script did not. A rank that was not there then counts in neither.
    """
    samples: Numbers
    """[samples] 1 + index in the dataset, 0: nobody fetched it. Exact below 2**53."""
    used: Numbers
    """[parameters] number of ranks with a gradient"""
    buffers: Numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The summed vector as plain numbers."""

    samples: tuple[int, ...]
    counts: tuple[int, ...]
    weights: tuple[float, ...]
    losses: tuple[float, ...]
    total_weight: float
    loss: float
    """Σ w·loss / Σ w in micro-batch order; NaN if no micro-batch had a weight."""
    scale: float
    """The mean over the micro-batches that have a gradient; 1 if none has."""


def read_summary(parts: Parts) -> Summary:
    weights: list[float] = parts.weights.tolist()
    losses: list[float] = parts.losses.tolist()
    total, weighted = 0.0, 0.0
    for weight, loss in zip(weights, losses, strict=True):
        if weight:
            total += weight
            weighted += weight * loss
    counts = parts.counts.tolist()
    scales = [scale for scale in parts.scales.tolist() if scale]
    return Summary(
        samples=tuple((parts.samples - 1).astype(np.int64).tolist()),
        counts=tuple(map(int, counts)),
        weights=tuple(weights),
        losses=tuple(losses),
        total_weight=total,
        loss=weighted / total if total else math.nan,
        scale=sum(scales) / len(scales) if scales else 1.0,
    )


def find_not_finite(summary: Summary) -> int | None:
    """Index of the first micro-batch whose loss is NaN or infinite."""
    for index, (weight, loss) in enumerate(zip(summary.weights, summary.losses, strict=True)):
        if weight and not math.isfinite(loss):
            return index
    return None

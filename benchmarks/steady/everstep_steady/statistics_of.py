"""Paired ratios with their uncertainty. Pure."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

RESAMPLES = 5000


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """The median of paired ratios, and the interval that covers 95 % of resampled medians."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f}–{self.high:.3f})"


def pair(ours: Sequence[float], theirs: Sequence[float], seed: int = 0) -> Ratio:
    """The median of the ratios, with an interval by bootstrap over the pairs.

    The two values at an index were measured close together in time.
    """
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    chance = random.Random(seed)
    drawn = sorted(median(chance.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    cut = RESAMPLES // 40
    return Ratio(median=median(ratios), low=drawn[cut], high=drawn[-cut - 1])

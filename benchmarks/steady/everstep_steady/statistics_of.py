"""Paired ratios with their uncertainty. Pure."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

RESAMPLES = 5000


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """A paired ratio, and the interval that covers 95 % of the ratios of resampled measurements."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} ({self.low:.3f}–{self.high:.3f})"


Starts = Sequence[Sequence[float]]
"""Start → its values, one per round."""


def pair(ours: Starts, theirs: Starts, seed: int = 0) -> Ratio:
    """The mean over the starts of the median ratio of their rounds. The interval is a bootstrap over
    the starts, and over the rounds within each.

    The two values of a round were measured close together in time.
    """
    ratios = [
        [a / b for a, b in zip(mine, other, strict=True)]
        for mine, other in zip(ours, theirs, strict=True)
    ]
    chance = random.Random(seed)
    drawn = sorted(_mean(_draw(ratios, chance)) for _ in range(RESAMPLES))
    cut = RESAMPLES // 40
    return Ratio(mean=_mean(ratios), low=drawn[cut], high=drawn[-cut - 1])


def _draw(starts: Starts, chance: random.Random) -> Starts:
    chosen = chance.choices(starts, k=len(starts))
    return [chance.choices(rounds, k=len(rounds)) for rounds in chosen]


def _mean(starts: Starts) -> float:
    return fmean(median(rounds) for rounds in starts)

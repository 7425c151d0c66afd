"""What the logs of one run say. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median

from everstep_checkpoint.workload import Step

WARM_UP = 5
"""Steps that no figure but the first save's uses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One run. Times of the slowest rank; None: this system or this size has no such figure."""

    system: str
    mib: int
    ranks: int
    stall_ms_p50: float
    stall_ms_p99: float
    slowdown: float
    """The steps from a save up to half of the way to the next, beside the other half; median."""
    first_ms: float
    durable_s: float | None
    bytes: int
    restore_gbs: float | None
    memory_gbs: float | None
    """The same, where the chunks are in the agent's memory already."""
    limit_gbs: float
    """A memcpy of as many bytes in the same run; by all ranks at the same time, where these load so."""
    step_ms: float

    def to_document(self) -> dict[str, object]:
        return {"settings": "", **asdict(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    stalls: tuple[float, ...]
    """Seconds, one for each save but the first."""
    first: float
    slowdown: float
    step: float


def judge(ranks: Sequence[Sequence[Step]], every: int) -> Cost:
    """The cost of the saves, one after each `every` steps, for the slowest rank at each of them."""
    each = [_stalls_of(steps, every) for steps in ranks]
    stalls = [max(found) for found in zip(*each, strict=True)]
    lengths = [max(found) for found in zip(*(_lengths(steps) for steps in ranks), strict=True)]
    return Cost(
        stalls=tuple(stalls[1:]),
        first=stalls[0],
        slowdown=_compare_halves(lengths, every),
        step=median(lengths[WARM_UP:]),
    )


def _stalls_of(steps: Sequence[Step], every: int) -> list[float]:
    """What each save added to the time outside of the computation: after the step that it follows, and
    before the next one is applied.
    """
    gaps = {
        last.number: next_.began - last.applied + next_.applying - next_.computed
        for last, next_ in pairwise(steps)
    }
    plain = median(gap for number, gap in gaps.items() if number % every and number > WARM_UP)
    return [gap - plain for number, gap in gaps.items() if number % every == 0]


def _lengths(steps: Sequence[Step]) -> list[float]:
    """From each step's beginning to the next one's."""
    return [b.began - a.began for a, b in pairwise(steps)]


def _compare_halves(lengths: Sequence[float], every: int) -> float:
    """`lengths[i]` is that of step i + 1. A save after step s lies in the length of step s."""
    half = every // 2
    firsts = range(2 * every - 1, len(lengths) - every + 1, every)
    return median(
        sum(lengths[n : n + half]) / sum(lengths[n + half : n + 2 * half]) for n in firsts
    )


def find_durable(walls: Mapping[int, float], written: Mapping[int, float]) -> float | None:
    """Median seconds from the end of a step to the last file of its checkpoint, the first left out.

    Args:
        walls: step → time of day at which it was applied.
        written: step → modification time of the newest file of its checkpoint.
    """
    spent = [written[step] - walls[step] for step in sorted(walls) if step in written]
    return median(spent[1:]) if len(spent) > 1 else None


def judge_loads(ranks: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """Source → seconds of the best try, each as long as its slowest rank took.

    Args:
        ranks: what each rank has measured: source → seconds of each try.
    """
    return {
        source: min(map(max, zip(*(rank[source] for rank in ranks), strict=True)))
        for source in (ranks[0] if ranks else ())
    }


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * share) - 1)]

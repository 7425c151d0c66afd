"""Computes the figures of one run from its logs. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median

from everstep_checkpoint.workload import Step

WARM_UP = 5
"""Number of first steps that the medians leave out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One run. Times are those of the slowest rank. None: there is no such figure for this system
    or size.
    """

    system: str
    mib: int
    ranks: int
    stall_ms_p50: float
    stall_ms_p99: float
    added_ms_p50: float
    """What a save adds to the two steps around it, wherever in these steps the system waits."""
    added_ms_p99: float
    slowdown: float
    """Time of the steps in the half interval after a save, divided by that of the other half;
    median.
    """
    first_ms: float
    durable_s: float | None
    bytes: int
    restore_gbs: float | None
    memory_gbs: float | None
    """The same when the chunks are already in the agent's memory."""
    limit_gbs: float
    """Speed of a memcpy of as many bytes in the same run. If the ranks load at the same time, they
    also copy at the same time.
    """
    tensors_gbs: float | None
    """The same, tensor by tensor: the C library copies a block of the size of a tensor in another
    way than a large block.
    """
    step_ms: float

    def to_document(self) -> dict[str, object]:
        return {"settings": "", **asdict(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    stalls: tuple[float, ...]
    """Seconds, one for each save but the first."""
    added: tuple[float, ...]
    """The same for the length of the two steps around a save."""
    first: float
    slowdown: float
    step: float


def judge(ranks: Sequence[Sequence[Step]], every: int) -> Cost:
    """The cost of the saves, which follow every `every` steps. For each save the slowest rank
    counts.
    """
    each = [_stalls_of(steps, every) for steps in ranks]
    stalls = [max(found) for found in zip(*each, strict=True)]
    lengths = [max(found) for found in zip(*(_lengths(steps) for steps in ranks), strict=True)]
    return Cost(
        stalls=tuple(stalls[1:]),
        added=tuple(_find_added(lengths, every)[1:]),
        first=stalls[0],
        slowdown=_compare_halves(lengths, every),
        step=median(lengths[WARM_UP:]),
    )


def _stalls_of(steps: Sequence[Step], every: int) -> list[float]:
    """Seconds that each save added outside of the computation: between its step and the next one,
    and before the update of the next one.
    """
    gaps = {
        last.number: next_.began - last.applied + next_.applying - next_.computed
        for last, next_ in pairwise(steps)
    }
    plain = median(gap for number, gap in gaps.items() if number % every and number > WARM_UP)
    return [gap - plain for number, gap in gaps.items() if number % every == 0]


def _lengths(steps: Sequence[Step]) -> list[float]:
    """Seconds from the start of each step to the start of the next one."""
    return [b.began - a.began for a, b in pairwise(steps)]


def _find_added(lengths: Sequence[float], every: int) -> list[float]:
    """Seconds that each save added to its step and the next one, beyond twice the median of the
    second half of the steps before a save.

    The stall leaves out what a system waits for within its backward pass, such as the other ranks
    that are late because of the save. This does not.
    """
    plain = median(
        length
        for number, length in enumerate(lengths, 1)
        if number % every > every // 2 and number > WARM_UP
    )
    saved = range(every, len(lengths), every)
    return [lengths[number - 1] + lengths[number] - 2 * plain for number in saved]


def _compare_halves(lengths: Sequence[float], every: int) -> float:
    """Divide the time of the steps in the half interval after each save by that of the other half.
    Returns the median.

    `lengths[i]` is the length of step i + 1. The length of step s includes a save after step s.
    """
    half = every // 2
    firsts = range(2 * every - 1, len(lengths) - every + 1, every)
    return median(
        sum(lengths[n : n + half]) / sum(lengths[n + half : n + 2 * half]) for n in firsts
    )


def find_durable(walls: Mapping[int, float], written: Mapping[int, float]) -> float | None:
    """Median seconds from the end of a step to the last file of its checkpoint, without the first
    checkpoint.

    Args:
        walls: step → time of day at which it was applied.
        written: step → modification time of the newest file of its checkpoint.
    """
    spent = [written[step] - walls[step] for step in sorted(walls) if step in written]
    return median(spent[1:]) if len(spent) > 1 else None


def judge_loads(ranks: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """Source → seconds of the best try. A try takes as long as its slowest rank.

    Args:
        ranks: for each rank, source → seconds of each try.
    """
    return {
        source: min(map(max, zip(*(rank[source] for rank in ranks), strict=True)))
        for source in (ranks[0] if ranks else ())
    }


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * share) - 1)]

"""Splits the time from a fault to the next step, from the log lines of all ranks. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from everstep_recovery.lines import Line

STEPS = 9
"""Number of steps before the fault that define the usual length of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """`rest` + `again` cannot be avoided, because the dead rank's passes were lost with it;
    `beyond` could be.
    """

    step: float
    """Seconds of an undisturbed step: the median of the steps before the fault."""
    rest: float
    """Seconds that the interrupted step would still have needed after the fault, if it was as long
    as usual.
    """
    passes_again: int
    """The most micro-batches that one member computed beyond its usual number."""
    again: float
    """Seconds of those passes: `passes_again` × the median of the passes before the fault."""
    beyond: float
    """Seconds to the next step, minus `rest` and `again`."""


def split_next_step(lines: Sequence[Line], fault: float, complete: float) -> Split | None:
    """Split the time to the next step. `lines` are sorted by time; `complete`: when all members had
    applied the next step.

    None: there were too few lines before the fault to know the usual length of a step.
    """
    before = [line for line in lines if line.t <= fault]
    ends = list_ends(before)[-STEPS:]
    passes = [seconds for line in before for seconds in line.passes]
    if len(ends) < 2 or not passes:
        return None
    step = measure_step(ends)
    rest = max(0.0, step - (fault - ends[-1]))
    during = [line for line in lines if fault < line.t <= complete]
    passes_again = _count_again(before, during)
    again = passes_again * median(passes)
    return Split(
        step=step,
        rest=rest,
        passes_again=passes_again,
        again=again,
        beyond=complete - fault - rest - again,
    )


def measure_step(ends: Sequence[float]) -> float:
    """Seconds of an undisturbed step: the median of the steps between these ends."""
    return median(later - earlier for earlier, later in pairwise(ends))


def list_ends(before: Sequence[Line]) -> list[float]:
    """When the last rank had applied each step."""
    ends: dict[int, float] = {}
    for line in before:
        ends[line.step] = line.t
    return [ends[step] for step in sorted(ends)]


def _count_again(before: Sequence[Line], during: Sequence[Line]) -> int:
    """The most passes that one process computed again. Of a step that it had not applied yet, these
    are the passes beyond the usual number; of a step that it had applied already, all passes.
    """
    usual = median(len(line.passes) for line in before)
    newest = max(line.step for line in before)
    applied = {line.pid: line.step for line in before}
    again: dict[int, float] = {}
    for line in during:
        new = line.step > applied.get(line.pid, newest)
        again[line.pid] = again.get(line.pid, 0) + len(line.passes) - (usual if new else 0)
    return max(0, round(max(again.values(), default=0)))

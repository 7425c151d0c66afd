"""How much training was done in a storm, from the log lines of all ranks. Pure.

All systems use the samples in the same order: step s consists of the same `batch` samples, whatever
the number of ranks.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from everstep_recovery.lines import Line
from everstep_recovery.reading import count_unlogged, find_complete, list_history

QUIET_PART = 1 / 3
"""The last part of the time between two faults, in which a system should train as if undisturbed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of the final history."""

    number: int
    t: float
    """When the last member had applied it."""
    samples: int
    """Number of samples in it that no earlier step had used."""
    repeated: int
    """How often it used a sample that this step or an earlier one had used already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    seconds: float
    """Length of the storm."""
    samples: int
    """Samples of the final history in steps that ended within the storm, each counted once."""
    steps: int
    """Steps of the final history that ended within the storm."""
    steps_again: int
    """Steps that all members had applied and that were taken again."""
    samples_lost: int
    """Samples of the order, up to the last step, that are in no step of the final history."""
    samples_repeated: int
    pauses: tuple[float | None, ...]
    """Seconds from each fault until all members had applied a new step; None: not within the run."""
    quiet_samples_per_second: float | None
    """Samples per second shortly before faults, at full size; None: the system had not returned to
    its full size.
    """
    progress: tuple[float, ...]
    """Samples used after 0, 1, 2, … seconds of the storm, in units of a global batch."""

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.seconds


def judge_storm(
    lines: Sequence[Line], faults: Sequence[float], *, began: float, seconds: float, batch: int
) -> Outcome:
    """Compute the outcome. `lines` are sorted by time; the storm lasted `seconds` from the time
    `began`.
    """
    steps = list_steps(list_history(lines), batch)
    within = [step for step in steps if began < step.t <= began + seconds]
    last = steps[-1].number if steps else 0
    return Outcome(
        seconds=seconds,
        samples=sum(step.samples for step in within),
        steps=len(within),
        steps_again=count_again(lines),
        samples_lost=last * batch - sum(step.samples for step in steps),
        samples_repeated=sum(step.repeated for step in steps),
        pauses=tuple(_find_pause(lines, fault) for fault in faults),
        quiet_samples_per_second=_find_quiet_rate(steps, lines, faults),
        progress=_list_progress(within, began, seconds, batch),
    )


def list_steps(history: Sequence[Line], batch: int) -> list[Step]:
    """The steps of a history, by number; each combines the lines of all its ranks."""
    by_step: dict[int, list[Line]] = defaultdict(list)
    for line in history:
        by_step[line.step].append(line)
    seen: set[int] = set()
    found: list[Step] = []
    for number in sorted(by_step):
        own = by_step[number]
        used = [sample for line in own for sample in line.samples]
        fresh = set(used) - seen
        seen |= fresh
        samples = len(fresh) + count_unlogged(own, batch - len(fresh))
        repeated = len(used) - len(fresh)
        found.append(Step(number=number, t=own[-1].t, samples=samples, repeated=repeated))
    return found


def count_again(lines: Sequence[Line]) -> int:
    """How often a step was completed that had been completed before."""
    ranks: dict[int, set[int]] = defaultdict(set)
    complete: dict[int, int] = defaultdict(int)
    for line in lines:
        ranks[line.step].add(line.rank)
        if len(ranks[line.step]) >= line.world:
            complete[line.step] += 1
            ranks[line.step] = set()
    return sum(times - 1 for times in complete.values())


def compare_states(calm: dict[str, str], storm: dict[str, str]) -> tuple[int, list[int]]:
    """(number of steps whose state both logged, those of them at which the states differ)."""
    both = sorted((set(calm) & set(storm)), key=int)
    return len(both), [int(step) for step in both if calm[step] != storm[step]]


def _find_pause(lines: Sequence[Line], fault: float) -> float | None:
    newest = max((line.step for line in lines if line.t <= fault), default=0)
    complete = find_complete([line for line in lines if line.t > fault], newest, 1)
    return None if complete is None else complete - fault


def _find_quiet_rate(
    steps: Sequence[Step], lines: Sequence[Line], faults: Sequence[float]
) -> float | None:
    """The rate in the last part of each interval between two faults, if all steps in it were taken
    at full size.
    """
    full = max((line.world for line in lines), default=0)
    small = {line.step for line in lines if line.world < full}
    samples, seconds = 0, 0.0
    for earlier, later in pairwise(faults):
        begin = later - QUIET_PART * (later - earlier)
        inside = [step for step in steps if begin <= step.t < later]
        if len(inside) < 2 or any(step.number in small for step in inside):
            continue
        samples += sum(step.samples for step in inside[1:])
        seconds += inside[-1].t - inside[0].t
    return samples / seconds if seconds else None


def _list_progress(
    steps: Sequence[Step], began: float, seconds: float, batch: int
) -> tuple[float, ...]:
    found, done, index = [], 0, 0
    by_time = sorted(steps, key=lambda step: step.t)
    for second in range(int(seconds) + 1):
        while index < len(by_time) and by_time[index].t <= began + second:
            done += by_time[index].samples
            index += 1
        found.append(round(done / batch, 2))
    return tuple(found)

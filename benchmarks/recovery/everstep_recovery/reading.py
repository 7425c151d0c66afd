"""What a fault cost, from the log lines of all ranks. Pure."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from everstep_recovery.lines import Line
from everstep_recovery.splitting import Split, split_next_step


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The cost of one fault. None means: not within the limit of the run."""

    seconds_to_next_step: float | None
    """From the fault until all members have applied a step that none had applied before it."""
    seconds_to_full_size: float | None
    """The same with as many members as before."""
    split: Split | None
    """The parts of `seconds_to_next_step`."""
    steps_lost: int
    """Steps that every member had applied before the fault, and that were taken again."""
    samples_lost: int
    """Samples that the data order had passed and that no step of the final history used."""
    samples_repeated: int


def judge(lines: Sequence[Line], fault: float, size: int) -> Cost:
    """The cost of a fault at the time `fault`, for a group that started with `size` members."""
    before = [line for line in lines if line.t <= fault]
    after = [line for line in lines if line.t > fault]
    newest = max((line.step for line in before), default=0)
    history = leave_out_unfinished(list_history(lines))
    lost, repeated = count_samples(history, size)
    complete = find_complete(after, newest, 1)
    return Cost(
        seconds_to_next_step=_since(fault, complete),
        split=None if complete is None else split_next_step(lines, fault, complete),
        seconds_to_full_size=_since(fault, find_complete(after, newest, size)),
        steps_lost=_count_redone(before, after),
        samples_lost=max(0, lost - count_all_unlogged(history)),
        samples_repeated=repeated,
    )


def list_history(lines: Sequence[Line]) -> list[Line]:
    """The lines without what was rolled back.

    When a process takes its first step after it began or went back, it rolls back that step and all
    later ones: their lines no longer count if they were written before it began or went back.
    """
    first = {(line.pid, line.began): line for line in reversed(lines)}
    return [
        line
        for line in lines
        if not any(later.began > line.t and later.step <= line.step for later in first.values())
    ]


def leave_out_unfinished(history: Sequence[Line]) -> list[Line]:
    """The history without the newest step, if not all its ranks have logged it: the run's processes
    were ended meanwhile.
    """
    newest = max((line.step for line in history), default=0)
    own = [line for line in history if line.step == newest]
    if len({line.rank for line in own}) == max((line.world for line in own), default=0):
        return list(history)
    return [line for line in history if line.step < newest]


def count_samples(history: Sequence[Line], size: int) -> tuple[int, int]:
    """(lost, repeated).

    Each of `size` shards takes every size-th sample of the order. A shard has lost the samples that
    it did not use, up to the furthest one that it used.
    """
    used = Counter(sample for line in history for sample in line.samples)
    furthest: dict[int, int] = defaultdict(lambda: -1)
    taken: Counter[int] = Counter()
    for sample in used:
        shard, place = sample % size, sample // size
        furthest[shard] = max(furthest[shard], place)
        taken[shard] += 1
    lost = sum(place + 1 - taken[shard] for shard, place in furthest.items())
    return lost, sum(used.values()) - len(used)


def count_all_unlogged(history: Sequence[Line]) -> int:
    """Number of samples that were in a step although no line lists them. The newest step is left
    out, because its lines may still arrive.
    """
    by_step: dict[int, list[Line]] = defaultdict(list)
    for line in history:
        by_step[line.step].append(line)
    used = {step: sum(len(line.samples) for line in own) for step, own in by_step.items()}
    batch, newest = max(used.values(), default=0), max(used, default=0)
    return sum(
        count_unlogged(own, batch - used[step]) for step, own in by_step.items() if step < newest
    )


def count_unlogged(lines: Sequence[Line], missing: int) -> int:
    """How many of the `missing` samples of a step were in it, although no line lists them.

    A rank that dies between the sum and its log line leaves no line. But the other lines name a
    group that includes it, so its gradients were in the sum. It had no more samples than the
    others.
    """
    world = max(line.world for line in lines)
    absent = world - len({line.rank for line in lines if line.world == world})
    return min(missing, absent * max(len(line.samples) for line in lines))


def find_complete(after: Sequence[Line], newest: int, least: int) -> float | None:
    """When a complete group of at least `least` members had applied a step after `newest`."""
    ranks: dict[tuple[int, int], set[int]] = defaultdict(set)
    for line in after:
        if line.step <= newest or line.world < least:
            continue
        members = ranks[line.step, line.world]
        members.add(line.rank)
        if len(members) == line.world:
            return line.t
    return None


def _count_redone(before: Sequence[Line], after: Sequence[Line]) -> int:
    ranks: dict[int, set[int]] = defaultdict(set)
    for line in before:
        ranks[line.step].add(line.rank)
    whole = {line.step for line in before if len(ranks[line.step]) == line.world}
    return len(whole & {line.step for line in after})


def _since(fault: float, then: float | None) -> float | None:
    return None if then is None else then - fault

"""Runs all systems side by side, one at a time: the others stand still (SIGSTOP). So each round compares them
within seconds, and what the machine does from minute to minute meets all alike.
"""

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from everstep_steady import workload
from everstep_steady.launching import Running
from everstep_steady.marks import Block, Measured, measure

SETTLE_SECONDS = 0.2
"""After a stop, not measured: processes wake up, caches fill, and agents do what fell due meanwhile."""
Runs = dict[str, list[Measured]]
"""By system, one for each round."""


def interleave(
    systems: Sequence[str],
    world: int,
    *,
    rounds: int,
    seconds: float,
    chance: random.Random,
    tell: Callable[[str], None],
    extra: Mapping[str, str] | None = None,
) -> tuple[Runs, dict[str, float]]:
    """Each system's blocks of so many seconds, and the peak memory of its largest rank in MiB.

    Args:
        extra: More environment variables of all systems.

    Raises:
        RunFailed: A system does not train.
        TooShort: A block holds too few steps.
    """
    with ExitStack() as stack:
        running = []
        for system in systems:
            tell(f"{world} ranks: {system} starts")
            running.append(stack.enter_context(_start(system, world, extra)))
        blocks = []
        for number in range(rounds):
            tell(f"{world} ranks, round {number + 1} of {rounds}")
            order = chance.sample(running, len(running))
            blocks += [_run_block(one, seconds) for one in order]
        marks = {one.system: one.read() for one in running}
        peaks = {one.system: one.read_peak_mib() for one in running}
    runs: Runs = {system: [] for system in systems}
    for block in blocks:
        runs[block.system].append(measure(block, marks[block.system]))
    return runs, peaks


@contextmanager
def _start(system: str, world: int, extra: Mapping[str, str] | None) -> Iterator[Running]:
    """Up to the end of its warm-up; then it stands still."""
    running = Running(system, world, extra)
    try:
        running.wait_steps(workload.WARM_UP)
        running.freeze()
        yield running
        running.thaw()
    finally:
        running.end()


def _run_block(running: Running, seconds: float) -> Block:
    running.thaw()
    time.sleep(SETTLE_SECONDS)
    begin, before = time.monotonic(), running.read_agents_cpu()
    time.sleep(seconds)
    spent = running.read_agents_cpu() - before
    end = time.monotonic()
    running.freeze()
    return Block(system=running.system, begin=begin, end=end, agents_cpu_s=spent)

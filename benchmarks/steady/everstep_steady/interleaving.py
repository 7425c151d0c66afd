"""Runs all systems in turn: all are started, but only one runs at a time, and the others are
stopped (SIGSTOP). So each round compares them within seconds, and changes of the machine from
minute to minute affect all of them alike.
"""

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from everstep_steady import workload
from everstep_steady.launching import Running
from everstep_steady.marks import Block, Measured, measure

SETTLE_SECONDS = 0.2
"""Time after a stop that is not measured: processes wake up, caches fill, and agents catch up on
their work.
"""
LEAST_STEPS = 3
"""A block is longer than asked for until every rank has ended this many steps in it."""
Runs = dict[str, list[Measured]]
"""System → its measurements, one per round."""


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
    """Measure each system in blocks of at least `seconds`. Returns the measurements, and the peak memory of
    each system's largest rank in MiB.

    Args:
        extra: Additional environment variables of all systems.

    Raises:
        RunFailed: A system does not train.
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
    """Start the system, and stop its processes (SIGSTOP) after the warm-up. On exit, end it."""
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
    taken = max(map(len, running.read()))
    time.sleep(seconds)
    running.wait_steps(taken + LEAST_STEPS)
    spent = running.read_agents_cpu() - before
    end = time.monotonic()
    running.freeze()
    return Block(system=running.system, begin=begin, end=end, agents_cpu_s=spent)

"""Runs all systems in turn: all are started, but only one runs at a time, and the others are
stopped (SIGSTOP). So each round compares them within seconds, and changes of the machine from
minute to minute affect all of them alike.

All are started anew after some rounds: two processes of the same program differ by up to 5 % as long as
they live, because their memory lies elsewhere.
"""

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from everstep_steady import workload
from everstep_steady.launching import Running
from everstep_steady.marks import Block, Measured, measure

SETTLE_SECONDS = 3.5
"""Time after a stop that is not measured: processes wake up, caches fill, and agents use more CPU time for some seconds
(README, Earlier figures).
"""
LEAST_STEPS = 3
"""A block is longer than asked for until every rank has ended this many steps in it."""
Runs = dict[str, list[list[Measured]]]
"""System → its measurements: for each start one per round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    starts: int
    """How often all systems are started."""
    rounds: int
    """Blocks of each system after each start."""
    seconds: float
    """Shortest length of a block."""
    settle_seconds: float = SETTLE_SECONDS
    """Time after a stop before the block."""


def interleave(
    systems: Sequence[str],
    world: int,
    schedule: Schedule,
    *,
    chance: random.Random,
    tell: Callable[[str], None],
    extra: Mapping[str, str] | None = None,
) -> tuple[Runs, dict[str, float]]:
    """Measure each system. Returns the measurements, and the peak memory of each system's largest
    rank in MiB.

    Args:
        extra: Additional environment variables of all systems.

    Raises:
        RunFailed: A system does not train.
    """
    runs: Runs = {system: [] for system in systems}
    peaks = dict.fromkeys(systems, 0.0)
    for start in range(schedule.starts):
        where = f"{world} ranks, start {start + 1} of {schedule.starts}"
        with ExitStack() as stack:
            running = []
            for system in systems:
                tell(f"{where}: {system} starts")
                running.append(stack.enter_context(_start(system, world, extra)))
            blocks = []
            for number in range(schedule.rounds):
                tell(f"{where}, round {number + 1} of {schedule.rounds}")
                order = chance.sample(running, len(running))
                blocks += [_run_block(one, schedule) for one in order]
            for one in running:
                marks = one.read()
                runs[one.system].append(
                    [measure(b, marks) for b in blocks if b.system == one.system]
                )
                peaks[one.system] = max(peaks[one.system], one.read_peak_mib())
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


def _run_block(running: Running, schedule: Schedule) -> Block:
    running.thaw()
    time.sleep(schedule.settle_seconds)
    begin, before = time.monotonic(), running.read_agents_cpu()
    taken = max(map(len, running.read()))
    time.sleep(schedule.seconds)
    running.wait_steps(taken + LEAST_STEPS)
    spent = running.read_agents_cpu() - before
    end = time.monotonic()
    running.freeze()
    return Block(system=running.system, begin=begin, end=end, agents_cpu_s=spent)

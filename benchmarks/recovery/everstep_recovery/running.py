"""One run: start a system, wait until it trains, kill a rank, wait for its recovery, end it."""

import random
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from everstep_recovery import moments, processes
from everstep_recovery.faults import FAULTS
from everstep_recovery.lines import Line, parse_lines
from everstep_recovery.reading import Cost, judge
from everstep_recovery.systems import System

AFTER_STEPS = 5
"""Number of steps at full size after which a run is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    ranks: int
    limit: float
    """Seconds after the fault; what has not happened by then is reported as "not within"."""
    seed: int
    """Of the choice of the ranks."""
    phase: float
    """At which part of a step, from 0 to 1, the fault comes."""
    fault: str = "SIGKILL"


def play(system: System, plan: Plan) -> Cost:
    """Play one run and return the cost of its fault. Raises `processes.RunFailed`."""
    folder, fault = Path(tempfile.mkdtemp(prefix="everstep-recovery-")), FAULTS[plan.fault]
    try:
        with processes.started(system, plan.ranks, folder) as process:
            processes.wait_training(process, folder, plan.ranks, fault.warm_up)
            moment = _strike(process.pid, folder, plan)
            never = bool(system.explain_never_whole(stops=fault.stops))
            _wait_whole(process, folder, moment, plan, never=never)
        return judge(read(folder), moment, plan.ranks)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def read(folder: Path) -> list[Line]:
    return parse_lines(processes.read_records(folder))


def _strike(root: int, folder: Path, plan: Plan) -> float:
    """Send the signal to random ranks at the plan's part of a step; returns that moment."""
    fault, lines = FAULTS[plan.fault], read(folder)
    pids = {line.rank: line.pid for line in lines}
    hit: list[int] = []
    for rank in random.Random(plan.seed).sample(range(plan.ranks), fault.ranks):
        hit += processes.list_node(root, pids[rank]) if fault.node else [pids[rank]]
    least = time.monotonic() + moments.LEAD_SECONDS
    moment = moments.find_moment(lines, plan.phase, least)
    time.sleep(max(0.0, moment - time.monotonic()))
    processes.kill(hit, fault.signal)
    return time.monotonic()


def _wait_whole(
    process: "subprocess.Popen[bytes]", folder: Path, fault: float, plan: Plan, *, never: bool
) -> None:
    """Wait until the group has taken some steps at full size, the limit is over, or the system
    ends. `never`: the group stays smaller, so steps at any size are enough.
    """
    while time.monotonic() < fault + plan.limit and process.poll() is None:
        lines = read(folder)
        cost = judge(lines, fault, plan.ranks)
        took = cost.seconds_to_next_step if never else cost.seconds_to_full_size
        if took is not None:
            since = fault + took
            if len({line.step for line in lines if line.t > since}) > AFTER_STEPS:
                return
        time.sleep(processes.LOOK_SECONDS * 4)

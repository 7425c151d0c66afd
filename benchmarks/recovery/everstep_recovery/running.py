"""One run: start a system, wait until it trains, kill a rank, wait for its recovery, end it."""

import random
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from everstep_recovery import processes
from everstep_recovery.lines import Line, parse_lines
from everstep_recovery.reading import Cost, judge
from everstep_recovery.systems import System

LEARNT_STEPS = 65
"""After this many steps Everstep has learnt how long a step takes."""
AFTER_STEPS = 5
"""Number of steps at full size after which a run is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    ranks: int
    limit: float
    """Seconds after the fault; what has not happened by then is reported as "not within"."""
    seed: int
    fault: str = "SIGKILL"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    signal: signal.Signals
    ranks: int = 1
    """How many ranks get the signal."""
    node: bool = False
    """All processes of the rank's node get the signal."""

    @property
    def warm_up(self) -> int:
        """Steps before the fault. Processes that are stopped are found by limits that Everstep must
        have learnt.
        """
        return LEARNT_STEPS if self.signal is signal.SIGSTOP else processes.SETTLED_STEPS


NODE = "node without power"
FAULTS = {
    "SIGKILL": Fault(signal=signal.SIGKILL),
    "SIGSTOP": Fault(signal=signal.SIGSTOP),
    "SIGSEGV": Fault(signal=signal.SIGSEGV),
    "SIGKILL of two": Fault(signal=signal.SIGKILL, ranks=2),
    NODE: Fault(signal=signal.SIGSTOP, node=True),
}
"""To the other nodes, a node without power looks like one whose processes are stopped: it sends
nothing, and its connections stay open.
"""


def play(system: System, plan: Plan) -> Cost:
    """Play one run and return the cost of its fault. Raises `processes.RunFailed`."""
    folder = Path(tempfile.mkdtemp(prefix="everstep-recovery-"))
    try:
        with processes.started(system, plan.ranks, folder) as process:
            processes.wait_training(process, folder, plan.ranks, FAULTS[plan.fault].warm_up)
            fault = _strike(process.pid, folder, plan)
            _wait_whole(process, folder, fault, plan, never=bool(system.never_whole))
        return judge(read(folder), fault, plan.ranks)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def read(folder: Path) -> list[Line]:
    return parse_lines(processes.read_records(folder))


def _strike(root: int, folder: Path, plan: Plan) -> float:
    """Send the signal to random ranks at a random moment of a step; returns that moment."""
    chance, fault = random.Random(plan.seed), FAULTS[plan.fault]
    ranks = {line.rank: line.pid for line in read(folder)}
    time.sleep(chance.uniform(0, 0.5))
    for rank in chance.sample(range(plan.ranks), fault.ranks):
        hit = processes.list_node(root, ranks[rank]) if fault.node else [ranks[rank]]
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

"""One run: start a system, wait until it trains, kill a rank, wait for its recovery, end it."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep_recovery import workload
from everstep_recovery.lines import Line, parse_lines
from everstep_recovery.reading import Cost, judge
from everstep_recovery.systems import System, build_environ

START_SECONDS = 120.0
LOOK_SECONDS = 0.05
SETTLED_STEPS = 12
"""Steps before the fault: past the first checkpoint, so that no system has to start from step 1."""
AFTER_STEPS = 5
"""A run is over after so many steps at full size."""


class RunFailed(Exception):
    """The system did not begin to train; the message has the end of its output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    ranks: int
    limit: float
    """Seconds after the fault; what has not happened by then is reported as "not within"."""
    seed: int
    fault: str = "SIGKILL"


FAULTS = {
    "SIGKILL": (signal.SIGKILL, 1),
    "SIGSEGV": (signal.SIGSEGV, 1),
    "SIGKILL of two": (signal.SIGKILL, 2),
}
"""Name → the signal, and how many ranks get it."""


def play(system: System, plan: Plan) -> Cost:
    """Play one run and return the cost of its fault. Raises `RunFailed`."""
    folder = Path(tempfile.mkdtemp(prefix="everstep-recovery-"))
    try:
        with _started(system, plan.ranks, folder) as process:
            _wait_training(process, folder, plan.ranks)
            fault = _strike(folder, plan)
            _wait_whole(process, folder, fault, plan, never=bool(system.never_whole))
        return judge(read(folder), fault, plan.ranks)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def read(folder: Path) -> list[Line]:
    records: list[dict[str, Any]] = []
    for file in folder.glob("*.jsonl"):
        whole = file.read_text().rpartition("\n")[0]
        records += [json.loads(text) for text in whole.splitlines()]
    return parse_lines(records)


@contextlib.contextmanager
def _started(system: System, ranks: int, folder: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Start the system in a session of its own; kill all its processes at the end."""
    out = {workload.OUT: str(folder), workload.STEPS: "100000"}
    with (folder / "output.txt").open("wb") as sink:
        process = subprocess.Popen(
            system.command(folder, ranks),
            cwd=folder, stdout=sink, stderr=sink, start_new_session=True,
            env=build_environ(system, out),
        )  # fmt: skip
    try:
        yield process
    finally:
        for pid in [*_list_ranks(folder), *_list_tree(process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def _wait_training(process: "subprocess.Popen[bytes]", folder: Path, ranks: int) -> None:
    end = time.monotonic() + START_SECONDS
    while True:
        done = {line.rank for line in read(folder) if line.step >= SETTLED_STEPS}
        if len(done) == ranks:
            return
        if process.poll() is not None or time.monotonic() > end:
            output = (folder / "output.txt").read_text(errors="replace")[-2000:]
            raise RunFailed(f"{len(done)} of {ranks} ranks reached step {SETTLED_STEPS}: {output}")
        time.sleep(LOOK_SECONDS)


def _strike(folder: Path, plan: Plan) -> float:
    """Send the signal to random ranks at a random moment of a step; returns that moment."""
    chance = random.Random(plan.seed)
    number, count = FAULTS[plan.fault]
    ranks = {line.rank: line.pid for line in read(folder)}
    time.sleep(chance.uniform(0, 0.5))
    for rank in chance.sample(range(plan.ranks), count):
        os.kill(ranks[rank], number)
    return time.monotonic()


def _wait_whole(
    process: "subprocess.Popen[bytes]", folder: Path, fault: float, plan: Plan, *, never: bool
) -> None:
    """Wait until the group took some steps at full size, the limit is over, or the system ends.
    `never`: it stays smaller, so a step of any size is enough.
    """
    while time.monotonic() < fault + plan.limit and process.poll() is None:
        lines = read(folder)
        cost = judge(lines, fault, plan.ranks)
        took = cost.seconds_to_next_step if never else cost.seconds_to_full_size
        if took is not None:
            since = fault + took
            if len({line.step for line in lines if line.t > since}) > AFTER_STEPS:
                return
        time.sleep(LOOK_SECONDS * 4)


def _list_ranks(folder: Path) -> list[int]:
    return [int(file.stem) for file in folder.glob("*.jsonl")]


def _list_tree(root: int) -> list[int]:
    """The pids of the process and of all that it started, found by parent."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            fields = stat.read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found, open_ends = [], [root]
    while open_ends:
        pid = open_ends.pop()
        found.append(pid)
        open_ends += children.get(pid, [])
    return found

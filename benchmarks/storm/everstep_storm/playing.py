"""One run: start a system, expose it to a storm, let it return to its full size, end it."""

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep_recovery import processes, workload
from everstep_recovery.lines import Line, parse_lines
from everstep_storm.faults import Strike
from everstep_storm.goodput import Outcome, judge_storm
from everstep_storm.striking import Striker, Struck
from everstep_storm.systems import Contender

LOOK_SECONDS = 0.1
WHOLE_SECONDS = 60.0
"""Limit for the group to return to its full size after the storm."""
STOP_SECONDS = 90.0
"""Limit for Everstep to save and end."""
DIGEST_STEPS = 100
"""Steps between two digests of the state that a rank logs; a digest takes 15 ms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    ranks: int
    seconds: float
    strikes: Sequence[Strike] = ()
    until: int = 0
    """The storm ends early, at this step; 0: it does not."""

    @property
    def batch(self) -> int:
        """Samples of a global step."""
        return workload.MICRO_BATCH * workload.MICRO_BATCHES * self.ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    outcome: Outcome
    struck: Sequence[Struck]
    probed: int
    """Number of stopped processes that the system left to the benchmark's probe."""
    last_step: int
    states: dict[str, str]
    """Step → digest of the state after it, if all ranks agree; otherwise all their digests,
    separated by spaces.
    """
    verify: str = ""
    """What `everstep verify` objects to; empty: nothing, or the run is not Everstep's."""
    problem: str = ""
    """Why the system ended before the storm did; empty: it did not."""


def play(contender: Contender, plan: Plan) -> Played:
    """Play one run. Raises `processes.RunFailed` if the system does not begin to train."""
    folder = Path(tempfile.mkdtemp(prefix="everstep-storm-"))
    try:
        with processes.started(
            contender.system, plan.ranks, folder, _build_environ(contender)
        ) as process:
            processes.wait_training(process, folder, plan.ranks)
            began = time.monotonic()
            striker = Striker(folder, process.pid)
            problem = _storm(process, striker, plan, began)
            seconds = time.monotonic() - began
            _wait_whole(process, striker, plan.ranks)
            if contender.proves:
                _stop(process)
        objection = _verify(folder) if contender.proves else ""
        return _conclude(folder, striker, plan, (began, seconds), (objection, problem))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _build_environ(contender: Contender) -> dict[str, str]:
    if not contender.proves:
        return {}
    return {workload.EXACT: "1", workload.DIGEST_EVERY: str(DIGEST_STEPS)}


def _storm(process: "subprocess.Popen[bytes]", striker: Striker, plan: Plan, began: float) -> str:
    """Let the storm pass. Returns why the system ended by itself; empty: it did not."""
    left = list(plan.strikes)
    while (passed := time.monotonic() - began) < plan.seconds:
        if process.poll() is not None:
            said = processes.read_output(striker.folder)
            return f"it ended by itself after {passed:.0f} s: {said}"
        if plan.until and _find_newest(striker.folder) >= plan.until:
            return ""
        striker.probe()
        if left and left[0].after <= passed:
            striker.strike(left.pop(0))
        due = left[0].after - (time.monotonic() - began) if left else LOOK_SECONDS
        time.sleep(min(LOOK_SECONDS, max(0.0, due)))
    return ""


def _wait_whole(process: "subprocess.Popen[bytes]", striker: Striker, ranks: int) -> None:
    """Wait, at most WHOLE_SECONDS, until as many living ranks as at the start have taken a step in
    a group of that size.
    """
    began = time.monotonic()
    last = max((s.t for s in striker.struck), default=0.0)
    while time.monotonic() < began + WHOLE_SECONDS and process.poll() is None:
        striker.probe()
        living = set(processes.list_ranks(striker.folder))
        newest = [r for pid, r in _read_newest(striker.folder).items() if pid in living]
        if sum(r.get("world") == ranks and r["t"] > last for r in newest) == ranks:
            return
        time.sleep(LOOK_SECONDS)


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """Stop the system as Ctrl-C does: it saves and ends."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        process.wait(STOP_SECONDS)


def _verify(folder: Path) -> str:
    run = folder / "store" / "train_everstep"
    command = [sys.executable, "-m", "everstep_agent.cli", "verify", str(run)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else (done.stdout + done.stderr)[-2000:]


def _conclude(
    folder: Path, striker: Striker, plan: Plan, time_of: tuple[float, float], said: tuple[str, str]
) -> Played:
    records = processes.read_records(folder)
    lines: list[Line] = parse_lines(records)
    began, seconds = time_of
    faults = [struck.t for struck in striker.struck if struck.pid]
    outcome = judge_storm(lines, faults, began=began, seconds=seconds, batch=plan.batch)
    return Played(
        outcome=outcome,
        struck=striker.struck,
        probed=striker.probed,
        last_step=max((line.step for line in lines), default=0),
        states=_list_states(records),
        verify=said[0],
        problem=said[1],
    )


def _list_states(records: Sequence[dict[str, Any]]) -> dict[str, str]:
    found: dict[int, set[str]] = {}
    for record in records:
        if record["event"] == "state":
            found.setdefault(record["step"], set()).add(record["digest"])
    return {str(step): " ".join(sorted(found[step])) for step in sorted(found)}


def _find_newest(folder: Path) -> int:
    return max((r.get("step", 0) for r in _read_newest(folder).values()), default=0)


def _read_newest(folder: Path) -> dict[int, dict[str, Any]]:
    """Pid → the last record of a step that the process wrote."""
    found: dict[int, dict[str, Any]] = {}
    for file in folder.glob("*.jsonl"):
        with file.open("rb") as source:
            source.seek(max(0, file.stat().st_size - 8192))
            lines = source.read().rpartition(b"\n")[0].split(b"\n")
        for line in lines[1:]:
            record = json.loads(line)
            if record["event"] == "step":
                found[int(file.stem)] = record
    return found

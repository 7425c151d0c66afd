"""The processes of a run: start a system, wait until it trains, find its ranks, end all of it."""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from everstep_recovery import workload
from everstep_recovery.faults import SETTLED_STEPS
from everstep_recovery.systems import System, build_environ

START_SECONDS = 600.0
LOOK_SECONDS = 0.05
END_SECONDS = 10.0


class RunFailed(Exception):
    """The system did not begin to train; the message contains the end of its output."""


@contextlib.contextmanager
def started(
    system: System, ranks: int, folder: Path, environ: Mapping[str, str] | None = None
) -> Iterator["subprocess.Popen[bytes]"]:
    """Start the system in its own session; kill all its processes at the end.

    Args:
        folder: for this run only; its path identifies the run's processes.
        environ: additional environment variables for the training script.
    """
    out = {workload.OUT: str(folder), workload.STEPS: "100000", **(environ or {})}
    with (folder / "output.txt").open("wb") as sink:
        process = subprocess.Popen(
            system.command(folder, ranks),
            cwd=folder, stdout=sink, stderr=sink, start_new_session=True,
            env=build_environ(system, out),
        )  # fmt: skip
    try:
        yield process
    finally:
        end_all(folder)
        process.wait()


def wait_training(
    process: "subprocess.Popen[bytes]", folder: Path, ranks: int, least: int = SETTLED_STEPS
) -> None:
    """Wait until every rank has taken `least` steps. Raises `RunFailed`."""
    end = time.monotonic() + START_SECONDS
    while True:
        done = {r["rank"] for r in read_records(folder) if r.get("step", 0) >= least}
        if len(done) == ranks:
            return
        if process.poll() is not None or time.monotonic() > end:
            said = read_output(folder)
            raise RunFailed(f"{len(done)} of {ranks} ranks reached step {least}: {said}")
        time.sleep(LOOK_SECONDS)


def read_records(folder: Path) -> list[dict[str, Any]]:
    """What the ranks have logged so far. Each process's records are in the order in which it wrote
    them.
    """
    records: list[dict[str, Any]] = []
    for file in folder.glob("*.jsonl"):
        whole = file.read_text().rpartition("\n")[0]
        records += [json.loads(text) for text in whole.splitlines()]
    return records


def read_output(folder: Path) -> str:
    """The end of what the system printed."""
    return (folder / "output.txt").read_text(errors="replace")[-2000:]


def list_ranks(folder: Path) -> list[int]:
    """The pids of the living training processes."""
    logs = {int(file.stem) for file in folder.glob("*.jsonl")}
    return sorted(logs & set(list_own(folder)))


def list_own(folder: Path) -> list[int]:
    """The pids of all living processes of the run, whoever is their parent now.

    They are recognized by their environment, so a pid that another process has reused is not
    included.
    """
    mark = f"{workload.OUT}={folder}".encode()
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in environ.read_bytes().split(b"\0"):
                found.append(int(environ.parent.name))
    return found


def list_tree(root: int) -> list[int]:
    """The pids of the process and of all that it started, found by parent."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            children.setdefault(int(read_stat(stat)[1]), []).append(int(stat.parent.name))
    found, open_ends = [], [root]
    while open_ends:
        pid = open_ends.pop()
        found.append(pid)
        open_ends += children.get(pid, [])
    return found


def list_node(root: int, rank: int) -> list[int]:
    """All processes of the rank's node.

    A node is a child of the first process, `root`, with everything that it has started. The child
    is an agent, or the rank itself.
    """
    top = rank
    with contextlib.suppress(OSError):
        while (parent := int(read_stat(Path(f"/proc/{top}/stat"))[1])) not in (root, 1):
            top = parent
    return list_tree(top)


def read_stat(path: Path) -> list[str]:
    """The fields of `/proc/PID/stat` after the name: state, parent, … Raises OSError."""
    return path.read_text().rpartition(")")[2].split()


def kill(pids: list[int], number: signal.Signals = signal.SIGKILL) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def end_all(folder: Path) -> None:
    """Kill all processes of the run, also stopped ones. This is repeated, because some may be
    started while others are being killed.
    """
    end = time.monotonic() + END_SECONDS
    while (left := list_own(folder)) and time.monotonic() < end:
        kill(left)
        time.sleep(LOOK_SECONDS)

"""Starts a system, stops and resumes its processes, and ends it."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from everstep_steady import workload
from everstep_steady.marks import Marks, read_marks

HERE = Path(__file__).parent
PARTS = (HERE.parent, HERE.parents[1] / "recovery")
"""Where the scripts find what they import."""
START_SECONDS = 120.0
"""Limit for all ranks' first steps."""
END_SECONDS = 20.0
LOOK_SECONDS = 0.1


class RunFailed(Exception):
    """The system does not train, or has lost a rank; the message contains the end of its output."""


class Running:
    """One system, whose ranks train until it is ended.

    Args:
        system: One of `cli.SYSTEMS` or `cli.SHARDED`.
        extra: Additional environment variables.
    """

    def __init__(self, system: str, world: int, extra: Mapping[str, str] | None = None) -> None:
        self.system, self.world = system, world
        self._folder = Path(tempfile.mkdtemp(prefix="everstep-steady-"))
        environ = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([*map(str, PARTS), os.environ.get("PYTHONPATH", "")]),
            workload.OUT: str(self._folder),
            workload.EXACT: "1" if system.endswith("exact") else "",
            **(extra or {}),
        }
        environ.pop("PYTHONDONTWRITEBYTECODE", None)
        if system.startswith("everstep"):
            shard = int(environ.get(workload.SHARD, "1"))
            self._processes = [self._start(_everstep(world, shard, self._folder), environ)]
        else:
            shared = {**environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port()}
            shared["WORLD_SIZE"] = str(world)
            script = HERE / f"train_{system.partition(' ')[0]}.py"
            command = [sys.executable, str(script)]
            ranks = [{**shared, "RANK": str(rank)} for rank in range(world)]
            self._processes = [self._start(command, one) for one in ranks]

    def _start(self, command: list[str], environ: Mapping[str, str]) -> "subprocess.Popen[bytes]":
        with (self._folder / "output.txt").open("ab") as sink:
            return subprocess.Popen(
                command, env=dict(environ), cwd=self._folder, stdout=sink, stderr=sink
            )

    def wait_steps(self, count: int) -> None:
        """Wait until every rank has taken `count` steps. Raises `RunFailed`."""
        until = time.monotonic() + START_SECONDS
        while len(found := self.read()) < self.world or min(map(len, found)) < count:
            if time.monotonic() > until or any(p.poll() is not None for p in self._processes):
                raise self._fail()
            time.sleep(LOOK_SECONDS)

    def _fail(self) -> RunFailed:
        output = (self._folder / "output.txt").read_text(errors="replace")
        return RunFailed(f"{self.system} with {self.world} ranks: {output[-2000:]}")

    def read(self) -> list[Marks]:
        """The marks of each rank that has begun."""
        return [read_marks(path) for path in self._list_files()]

    def freeze(self) -> None:
        for process in self._list_tree():
            process.suspend()

    def thaw(self) -> None:
        for process in reversed(self._list_tree()):
            process.resume()

    def read_agents_cpu(self) -> float:
        """CPU seconds of the ranks' agents so far; 0 for torch's own systems, which have none.
        Raises `RunFailed`.
        """
        if not self.system.startswith("everstep"):
            return 0.0
        try:
            return sum(_read_cpu(psutil.Process(pid).ppid()) for pid in self._list_ranks())
        except psutil.NoSuchProcess:
            raise self._fail() from None

    def read_peak_mib(self) -> float:
        """Peak resident memory of the largest rank."""
        return max(_read_peak(pid) for pid in self._list_ranks())

    def end(self) -> None:
        tree = self._list_tree()
        for started in self._processes:
            started.send_signal(signal.SIGTERM)
        _, alive = psutil.wait_procs(tree, END_SECONDS)
        for process in alive:
            process.kill()
        for started in self._processes:
            started.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _list_tree(self) -> list[psutil.Process]:
        """The system's processes, parents before their children."""
        roots = [psutil.Process(p.pid) for p in self._processes if p.poll() is None]
        return [found for root in roots for found in (root, *root.children(recursive=True))]

    def _list_files(self) -> list[Path]:
        return sorted(self._folder.glob("*.marks"))

    def _list_ranks(self) -> list[int]:
        return [int(path.stem.partition("-")[2]) for path in self._list_files()]


def _everstep(world: int, shard: int, folder: Path) -> list[str]:
    command = [sys.executable, "-m", "everstep_agent.cli", "run", "--workers", str(world)]
    command += ["--mesh", f"shard={shard}"]
    script = str(HERE / "train_everstep.py")
    return [*command, "--save-every", "0", "--store", str(folder / "store"), script]


def _read_cpu(pid: int) -> float:
    """CPU seconds of a process's living threads, to the nanosecond (`times` counts in 10 ms)."""
    files = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9


def _read_peak(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])

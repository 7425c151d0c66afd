"""One run of a container: starts its shim and reads the shim's events until the container ends."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from everstep_lab import procs
from everstep_lab.node.clock import utc_now

SHIM = Path(__file__).with_name("shim.py")
POD_MARK = "EVERSTEP_LAB_POD"
EXIT_SIGKILL = 128 + signal.SIGKILL


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    exit_code: int
    signal: int = 0
    failed_to_start: str = ""
    """A message in runc's style if the command could not be run, else empty."""
    started_at: datetime | None = None
    finished_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: str
    log: Path


class ContainerProcess:
    """A running container. `pid` is its main process, `shim` the parent of that process.

    `wait` waits for the container's end and returns how it ended.
    """

    def __init__(self, shim: asyncio.subprocess.Process, events: asyncio.StreamReader) -> None:
        self._shim = shim
        self._events = events
        self.pid = 0
        self.started_at: datetime | None = None
        self._problem = ""

    @property
    def shim(self) -> int:
        return self._shim.pid

    async def started(self) -> bool:
        """Wait for the start. False if the command could not be run; `wait` then returns why."""
        event = await self._event()
        self.started_at = utc_now()
        if event is not None and "started" in event:
            self.pid = int(str(event["started"]))
            return True
        self._problem = str((event or {}).get("failed", "the container's shim died"))
        return False

    async def wait(self) -> Ended:
        event = None if self._problem else await self._event()
        await self._shim.wait()
        now = utc_now()
        if self._problem:
            return Ended(exit_code=128, failed_to_start=self._problem, finished_at=now)
        if event is None:  # the shim was killed, and its descendants with it
            return Ended(
                exit_code=EXIT_SIGKILL, signal=signal.SIGKILL, started_at=self.started_at,
                finished_at=now,
            )  # fmt: skip
        return Ended(
            exit_code=int(str(event["exited"])), signal=int(str(event["signal"])),
            started_at=self.started_at, finished_at=now,
        )  # fmt: skip

    def terminate(self) -> None:
        """Send SIGTERM to the main process, as the first step of a graceful stop."""
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to every process of the container. The shim then reports the end."""
        kill_all(self.processes())

    def processes(self) -> list[int]:
        return procs.descendants(self.shim)

    async def _event(self) -> dict[str, object] | None:
        line = await self._events.readline()
        return json.loads(line) if line.endswith(b"\n") else None


def kill_all(pids: Sequence[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


async def start_container(command: Command, spec_file: Path, mark: str) -> ContainerProcess:
    """Start a container.

    Call it from the main thread: the shim dies with the thread that started it.
    """
    spec = {
        "parent": os.getpid(), "argv": list(command.argv), "env": dict(command.env),
        "cwd": command.cwd, "log": os.fspath(command.log),
    }  # fmt: skip
    _write_private(spec_file, json.dumps(spec))
    read, write = os.pipe()
    try:
        shim = await _spawn(spec_file, write, mark)
    except BaseException:
        os.close(read)
        raise
    finally:
        os.close(write)
    return ContainerProcess(shim, await _reader(read))


def _write_private(path: Path, text: str) -> None:
    """Write a file that only its owner may read: the environment in it may contain secrets."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)


async def _spawn(spec_file: Path, events: int, mark: str) -> asyncio.subprocess.Process:
    python = getattr(sys, "_base_executable", sys.executable)
    return await asyncio.create_subprocess_exec(
        python, "-I", "-S", "-E", os.fspath(SHIM), os.fspath(spec_file), str(events),
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, pass_fds=[events],
        start_new_session=True, env={procs.MARK: mark},
    )  # fmt: skip


async def _reader(fd: int) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    pipe = os.fdopen(fd, "rb", buffering=0)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    return reader

"""One zygote process, as its agent sees it. The protocol is in `zygote_process.py`."""

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep_agent.pod import spawn
from everstep_agent.waiting import happens

PROGRAM = str(Path(__file__).with_name("zygote_process.py"))
ANSWER_SECONDS = 5.0
"""Limit for a warm zygote to fork a worker: about the time that a fresh interpreter takes."""
WARM_SECONDS = 60.0
"""Limit for a zygote to finish its imports, from its start. A worker waits for them: it would need
the same imports, and two processes that import at the same time are slower than one.
"""
CHUNK = 1 << 16


class Unusable(Exception):
    """The zygote forks no worker now; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What a zygote's workers run, and what the zygote imports before."""

    script: str
    args: tuple[str, ...] = ()
    warm: tuple[str, ...] = ()
    """Imported if they exist."""
    preload: tuple[str, ...] = ()
    """Named by the user: one that cannot be imported is reported."""
    open_files: spawn.Limits | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A module that the zygote could not import."""

    module: str
    error: str
    missing: bool


class Zygote:
    """A zygote that has been started. `output` is the read end of its stdout and stderr."""

    def __init__(self, program: Program, env: Mapping[str, str]) -> None:
        """Raises OSError if no process can be started."""
        self.settled = asyncio.Event()
        """It is warm, or has ended."""
        self.warm_after: float | None = None
        """Seconds from its start."""
        self.ended = False
        self.status: int | None = None
        self._turn = asyncio.Lock()
        """One request at a time, so that the limit of each begins when the zygote can handle it."""
        self._began = time.monotonic()
        self._control, theirs = socket.socketpair()
        self._control.setblocking(False)
        with theirs:
            self.pid, self.output = _start(program, env, theirs)
        order = {"agent": os.getpid(), "modules": [*program.warm, *program.preload]}
        self._control.send(json.dumps(order).encode() + b"\n")

    async def watch(self, on_warm: Callable[[list[Problem]], None]) -> None:
        """Watch the zygote until it has ended and is reaped."""
        loop = asyncio.get_running_loop()
        text = b""
        with contextlib.suppress(ConnectionError):
            while chunk := await loop.sock_recv(self._control, CHUNK):
                text += chunk
                if text.endswith(b"\n") and self.warm_after is None:
                    self.warm_after = time.monotonic() - self._began
                    on_warm([_problem(p) for p in json.loads(text)["problems"]])
                    self.settled.set()
        self.ended = True
        self.settled.set()
        self.kill()
        await spawn.wait_ended(self.pid)
        self.status = spawn.reap(self.pid)

    async def fork(self, env: Mapping[str, str]) -> spawn.Spawned:
        """Fork a worker with this environment. Raises Unusable."""
        left = max(0.0, WARM_SECONDS - (time.monotonic() - self._began))
        if not await happens(self.settled, left):
            raise Unusable(f"it still imports after {WARM_SECONDS:.0f} s")
        if self.ended:
            raise Unusable("it has ended")
        out_read, out_write = os.pipe()
        err_read, err_write = os.pipe()
        try:
            async with self._turn:
                pid = await self._request(env, out_write, err_write)
        except BaseException:
            os.close(out_read)
            os.close(err_read)
            raise
        finally:
            os.close(out_write)
            os.close(err_write)
        return spawn.Spawned(pid=pid, stdout=out_read, stderr=err_read)

    async def _request(self, env: Mapping[str, str], out: int, err: int) -> int:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with ours:
            try:
                with theirs:
                    socket.send_fds(self._control, [b"!"], [theirs.fileno(), out, err])
                async with asyncio.timeout(ANSWER_SECONDS):
                    answer = await _converse(ours, env)
            except TimeoutError:
                self.kill()
                raise Unusable(f"it has not answered for {ANSWER_SECONDS:.0f} s") from None
            except OSError as error:
                raise Unusable(f"it does not take the request: {error}") from None
            if "pid" not in answer:
                raise Unusable(
                    answer.get("refused", "its end of the connection closed without an answer")
                )
            with contextlib.suppress(OSError):  # it has died, which the agent sees in any case
                ours.send(b"!")
            pid: int = answer["pid"]
            return pid

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Close the connection, which makes the zygote end by itself."""
        self._control.close()


def _start(program: Program, env: Mapping[str, str], stdin: socket.socket) -> tuple[int, int]:
    """Process id, and the read end of its output."""
    arm, limits = spawn.die_with(os.getpid()), program.open_files

    def prepare() -> None:
        arm()
        if limits is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    output, write = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, PROGRAM, program.script, *program.args],
            env=dict(env),
            stdin=stdin.fileno(),
            stdout=write,
            stderr=write,
            start_new_session=True,
            preexec_fn=prepare,
        )
    except BaseException:
        os.close(output)
        raise
    finally:
        os.close(write)
    process.returncode = 0  # reaped by pid; Popen must never wait for this child
    return process.pid, output


async def _converse(connection: socket.socket, env: Mapping[str, str]) -> dict[str, Any]:
    """The answer; empty if the other side closed without one."""
    loop = asyncio.get_running_loop()
    with contextlib.suppress(OSError):  # closed: the zygote has refused without reading
        await loop.sock_sendall(connection, json.dumps(dict(env)).encode() + b"\n")
    line = b""
    while not line.endswith(b"\n"):
        chunk = await loop.sock_recv(connection, CHUNK)
        if not chunk:
            return {}
        line += chunk
    found: dict[str, Any] = json.loads(line)
    return found


def _problem(found: Mapping[str, str]) -> Problem:
    return Problem(module=found["module"], error=found["error"], missing=bool(found["missing"]))

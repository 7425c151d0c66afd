"""One agent of a run on one machine: its process, its folder in memory, its output."""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from everstep_agent import cores
from everstep_agent.local.plan import Plan
from everstep_agent.pod import spawn
from everstep_agent.waiting import happens
from everstep_contract import env, report

HOST = "127.0.0.1"
OUTPUT_SECONDS = 1.0
"""Limit for reading the last lines of an agent that has ended, because a process that it started
may keep its pipes open. Later lines are lost.
"""
KILL_SECONDS = 10.0
"""Limit for an agent to end after SIGKILL. Then it is left behind, and a message names it."""
CHUNK_BYTES = 1 << 16
PROGRAM = (sys.executable, "-P", "-m", "everstep_agent.cli")
"""-P: without it, a file of the current folder, such as `queue.py`, would replace a module of Python."""

Show = Callable[[list[str], bool], None]
"""Receives lines, and whether they came from stderr."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalJob:
    """What all agents of one run share."""

    plan: Plan
    uid: str
    token: str
    folder: Path
    """A folder in memory."""
    show: Show


@dataclass(slots=True)
class AgentProcess:
    slot: int
    attempt: int
    address: str
    memory: Path
    process: asyncio.subprocess.Process
    copies: list["asyncio.Task[None]"] = field(default_factory=list)

    @property
    def alive(self) -> bool:
        return self.process.returncode is None

    def kill(self) -> None:
        """Kill the agent, and its workers with what their scripts have started: only the agent would end that."""
        if self.alive:
            workers = spawn.list_children(self.process.pid)
            self.process.kill()
            for pid in workers:
                spawn.kill_group(pid)

    async def ended(self) -> str:
        """Wait for the process's end and its last lines. Return a message about a process that is
        left behind; empty: there is none.
        """
        over = asyncio.Event()
        waiting = asyncio.create_task(self.process.wait())
        waiting.add_done_callback(lambda _: over.set())
        ended = await happens(over, KILL_SECONDS)
        waiting.cancel()
        await asyncio.wait(self.copies, timeout=OUTPUT_SECONDS)
        pid = self.process.pid
        return (
            "" if ended else f"process {pid} has not ended after SIGKILL{spawn.describe_state(pid)}"
        )

    def read_report(self) -> report.ExitReport | None:
        try:
            return report.decode(_log(self.memory).read_bytes())
        except OSError:
            return None

    def describe_end(self) -> str:
        code = self.process.returncode
        if code is not None and code < 0:
            return f"killed by signal {-code} ({signal.Signals(-code).name})"
        return f"exited with status {code}"

    def remove_memory(self) -> None:
        """Remove its folder; the slot's next attempt has a folder of its own."""
        shutil.rmtree(self.memory, ignore_errors=True)


async def start(job: LocalJob, slot: int, attempt: int) -> AgentProcess:
    """Start an agent. Raises OSError if the process cannot be started."""
    memory = job.folder / f"slot-{slot}-{attempt}"
    memory.mkdir()
    settings = _build_settings(job, slot, attempt, memory)
    plan = job.plan
    process = await asyncio.create_subprocess_exec(
        *(*PROGRAM, "run", plan.script, "--", *plan.args),
        env=build_environ(dict(os.environ), settings, plan.workers),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=spawn.die_with(os.getpid()),
    )
    found = AgentProcess(slot, attempt, f"{HOST}:{settings.port}", memory, process)
    for reader, error in ((process.stdout, False), (process.stderr, True)):
        assert reader is not None
        found.copies.append(asyncio.create_task(_copy(reader, job.show, error)))
    return found


def _build_settings(job: LocalJob, slot: int, attempt: int, memory: Path) -> env.AgentEnv:
    plan = job.plan
    return env.AgentEnv(
        job=f"local/{plan.run}",
        job_uid=job.uid,
        slot=slot,
        attempt=attempt,
        token=job.token,
        pod_ip=HOST,
        port=_free_port(),
        mesh=plan.mesh,
        uri=plan.uri,
        run=plan.run,
        save_every_steps=plan.save_every,
        keep=plan.keep,
        hang_seconds=plan.hang_seconds,
        startup_seconds=plan.startup_seconds,
        guard_action=plan.guard_action,
        guard_factor=plan.guard_factor,
        memory=str(memory),
        termination_log=str(_log(memory)),
        zygote=int(plan.zygote),
        in_place=int(plan.in_place),
        max_redo_seconds=plan.max_redo_seconds,
        preload=plan.preload or None,
    )


def build_environ(environ: dict[str, str], settings: env.AgentEnv, workers: int) -> dict[str, str]:
    """On one machine the ranks use loopback and share the cores that this process may use."""
    environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    environ.setdefault("OMP_NUM_THREADS", str(cores.share_cores(workers)))
    return {**environ, **settings.to_env()}


async def _copy(reader: asyncio.StreamReader, show: Show, error: bool) -> None:
    """Show lines until the pipe closes. A line longer than 64 KiB is split."""
    rest = b""
    while chunk := await reader.read(CHUNK_BYTES):
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > CHUNK_BYTES:
            lines, rest = [*lines, rest], b""
        show([line.decode(errors="replace") for line in lines], error)
    if rest:
        show([rest.decode(errors="replace")], error)


def _log(memory: Path) -> Path:
    return memory / "termination-log"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port

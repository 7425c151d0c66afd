"""Agents as a kubelet runs them. Each is the main process of its own "container", which restarts
while the exit status asks for that. The container's memory folder outlives the agent.
"""

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO

from agent.gang import STUB
from everstep_agent.peers.client import PeerClient, PeerError
from everstep_agent.pod import zygote_process
from everstep_contract import env, levels, report


def is_zygote(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() == zygote_process.NAME
    except OSError:
        return False


class Container:
    """The container of one attempt of slot `slot`, over all its restarts."""

    def __init__(
        self, folder: Path, slot: int, environ: Mapping[str, str], **settings: object
    ) -> None:
        self.slot = slot
        self.address = free_address()
        self.memory = folder / f"memory-{slot}"
        self.termination = folder / f"termination-{slot}"
        self.output = folder / f"output-{slot}"
        self.codes: list[int] = []
        self._settings = settings
        self._environ = environ
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the agent. Its output goes to a file, or to a pipe that a test put there."""
        self.termination.write_bytes(b"")
        with self.output.open("ab") as out:
            self._process = self.run_command(out)

    def run_command(self, out: int | IO[bytes]) -> "subprocess.Popen[bytes]":
        """Run the container's command."""
        settings = env.AgentEnv(
            **{
                "job": "ns/job", "job_uid": "uid-1", "slot": self.slot, "attempt": 0,
                "pod_ip": self.address.partition(":")[0], "port": int(self.address.rpartition(":")[2]),
                "run": "ns/job",
                "memory": str(self.memory), "termination_log": str(self.termination),
                **self._settings,
            }
        )  # fmt: skip
        stub = {"STUB_UNTIL": "60", "STUB_STEP_MS": "20", "EVERSTEP_WARM": "", **self._environ}
        return subprocess.Popen(
            [sys.executable, "-m", "everstep_agent.cli", "run", STUB],
            env={**os.environ, **stub, **settings.to_env()},
            stdout=out, stderr=out, start_new_session=True,
        )  # fmt: skip

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def children(self) -> list[int]:
        """The pids of all processes below the agent."""
        found, queue = [], [self.pid]
        while queue:
            parent = queue.pop()
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{parent}/task/{parent}/children").read_text()
                found += (pids := [int(p) for p in text.split()])
                queue += pids
        return found

    def workers(self) -> list[int]:
        """The pids of the agent's children, except the zygote."""
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
            return [pid for pid in map(int, text.split()) if not is_zygote(pid)]
        return []

    def kill_all(self) -> None:
        """Kill every process, the agent first, as the OOM killer does with a whole cgroup."""
        for pid in [self.pid, *self.children()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    async def ended(self) -> int:
        assert self._process is not None
        code = await asyncio.to_thread(self._process.wait)
        self.codes.append(code)
        return code

    def report(self) -> report.ExitReport | None:
        return report.decode(self.termination.read_bytes())

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill_all()
            self._process.wait()


class Containers:
    """Plays the kubelet and the operator for a job of such containers."""

    def __init__(
        self,
        folder: Path,
        count: int,
        environ: Mapping[str, str] | Sequence[Mapping[str, str]] | None = None,
        attempt: int = 0,
        **settings: object,
    ) -> None:
        """`environ`: for all slots, or one per slot. The store is a folder unless `uri` is set."""
        store = folder / "store"
        store.mkdir(parents=True, exist_ok=True)
        self.store = str(settings.setdefault("uri", f"file://{store}"))
        self.token = secrets.token_hex(8)
        """Different for each job, because two jobs may find the same free port."""
        settings["token"] = self.token
        each = [environ or {}] * count if not isinstance(environ, Sequence) else environ
        self.attempt = attempt
        self.all = [
            Container(folder, slot, each[slot], attempt=attempt, **settings)
            for slot in range(count)
        ]
        self.seen = levels.Seen()
        peers = tuple(
            levels.Peer(slot=c.slot, attempt=attempt, address=c.address) for c in self.all
        )
        self.wanted = levels.Wanted(
            revision=1, peers=peers, min_workers=count, want_workers=count, max_workers=count
        )
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "Containers":
        self._tasks = [asyncio.create_task(self._keep(c)) for c in self.all]
        self._tasks += [asyncio.create_task(self._ask(c)) for c in self.all]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        for container in self.all:
            container.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _keep(self, container: Container) -> None:
        """Act as `restartPolicy: OnFailure`; report each end to the agents, as the operator does."""
        while True:
            container.start()
            if await container.ended() == report.EXIT_FOR_GOOD:
                return
            life = len(container.codes)
            dead = levels.DeadAgent(slot=container.slot, attempt=self.attempt, incarnation=life)
            others = tuple(d for d in self.wanted.dead if d.slot != container.slot)
            self.want(dead=(*others, dead))

    async def _ask(self, container: Container) -> None:
        async with PeerClient(container.address, self.token) as client:
            while True:
                with contextlib.suppress(PeerError):
                    seen = await client.call("/v1/wanted", self.wanted, levels.Seen, timeout=2.0)
                    if seen.coordinator is not None:
                        self.seen = seen
                await asyncio.sleep(0.05)

    def want(self, **changes: object) -> None:
        self.wanted = replace(self.wanted, revision=self.wanted.revision + 1, **changes)  # type: ignore[arg-type]

    async def until_step(self, step: int) -> None:
        async with asyncio.timeout(120):
            while self.seen.step < step:  # noqa: ASYNC110 told by other processes
                await asyncio.sleep(0.02)

    async def until_all_ended(self) -> None:
        async with asyncio.timeout(180):
            await asyncio.gather(*self._tasks[: len(self.all)])


def free_address() -> str:
    """Return a loopback address that only this job uses, so that no other process takes the port first."""
    host = f"127.{128 + os.getpid() % 100}.{secrets.randbelow(256)}.{1 + secrets.randbelow(254)}"
    with socket.socket() as found:
        found.bind((host, 0))
        return f"{host}:{found.getsockname()[1]}"

"""A pod of the storm: one attempt of a slot, on its own node, over all starts of its container."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from agent.containers import is_zygote
from everstep_contract import env, report

PORT = 7070
TOKEN = "a-token"
WORKER = Path(__file__).with_name("worker.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What all pods of the job share."""

    folder: Path
    environ: dict[str, str]
    settings: dict[str, object]
    script: Path = WORKER


class Pod:
    def __init__(
        self, training: Training, slot: int, attempt: int, node: tuple[str, list[str]]
    ) -> None:
        self.slot, self.attempt = slot, attempt
        self.ip, self._inside = node
        self.address = f"{self.ip}:{PORT}"
        self.lives = 0
        self.removed = False
        """Whether the operator has deleted it, so that it is not restarted."""
        self.reachable = True
        """Whether the operator can reach it."""
        self.report: report.ExitReport | None = None
        """Why its container has ended for good."""
        self.over = asyncio.Event()
        """Set once its container has ended for good."""
        self._training = training
        self._process: subprocess.Popen[bytes] | None = None
        name = f"{slot}-{attempt}"
        self._log = training.folder / f"agent-{name}.log"
        self._termination = training.folder / f"termination-{name}"
        self._settings = env.AgentEnv(
            **{
                "job": "ns/job", "job_uid": "uid-1", "slot": slot, "attempt": attempt, "token": TOKEN,
                "pod_ip": self.ip, "port": PORT, "run": "ns/job",
                "memory": str(training.folder / f"memory-{name}"),
                "termination_log": str(self._termination), **training.settings,
            }
        )  # fmt: skip

    def start(self) -> None:
        self.lives += 1
        self._termination.write_bytes(b"")
        command = [sys.executable, "-m", "everstep_agent.cli", "run", str(self._training.script)]
        with self._log.open("ab") as out:
            self._process = subprocess.Popen(
                [*self._inside, *command],
                env={**os.environ, **self._training.environ, **self._settings.to_env()},
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    async def ended(self) -> int:
        assert self._process is not None
        return await asyncio.to_thread(self._process.wait)

    def read_report(self) -> report.ExitReport | None:
        return report.decode(self._termination.read_bytes())

    @property
    def runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def workers(self) -> list[int]:
        """The pids of the agent's descendants, except the zygote, which ends with the agent."""
        found = []
        queue = [self._process.pid] if self._process is not None else []
        while queue:
            parent = queue.pop()
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{parent}/task/{parent}/children").read_text()
                found += (pids := [p for p in map(int, text.split()) if not is_zygote(p)])
                queue += pids
        return found

    def signal_agent(self, number: signal.Signals) -> None:
        if self.runs:
            assert self._process is not None
            self._process.send_signal(number)

    def signal_workers(self, number: signal.Signals) -> None:
        for pid in self.workers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> None:
        """Kill every process at once, as if the node had lost its power."""
        pids = self.workers()
        self.signal_agent(signal.SIGKILL)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

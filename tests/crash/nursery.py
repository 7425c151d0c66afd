"""Operators that start quickly: one process has imported `everstep_operator` and forks each of
them.

Each operator runs `everstep_operator.__main__.main` in its own process, as the console script does.
Only the import (2 s of CPU time) is saved, for hundreds of starts. Commands come on standard input,
one a line: a word and a replica's number. The answer is the replica's pid, or 0 once it has been
reaped.
"""

import asyncio
import os
import re
import select
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

ENDED = "nursery: the operator ended by itself,"
HANDED_OVER = "nursery: the operator ended as it was told to,"
RESTART_SECONDS = 1.0
_START_SECONDS = 120.0


class Operator:
    """Replicas of the operator, at most one process for each. All write to `log`. Use it with
    `async with`.

    `configs`: the kubeconfig of each replica.
    """

    def __init__(
        self, flags: Sequence[str], environ: Mapping[str, str], configs: Sequence[Path], log: Path
    ) -> None:
        self._flags, self._environ, self.log = flags, environ, log
        self._configs = configs
        self._turn = asyncio.Lock()
        self.pids = [0] * len(configs)
        self.crashes = 0
        """The number of kills. With several replicas, only those of leaders count."""
        self._struck = 0
        """The number of the last leader that was killed, in the order of leaders, from 1."""

    async def __aenter__(self) -> Self:
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-u", __file__, ",".join(map(str, self._configs)), *self._flags,
                env=dict(self._environ), stderr=log, start_new_session=True,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            )  # fmt: skip
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the nursery's standard input, which ends it and its operators."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()

    async def start(self) -> None:
        """Start all replicas."""
        async with self._turn:
            for replica in range(len(self.pids)):
                self.pids[replica] = int(await self._order("start", replica))

    async def kill(self) -> None:
        """Send SIGKILL to all replicas; returns when they have ended."""
        async with self._turn:
            for replica in range(len(self.pids)):
                await self._order("kill", replica)

    async def crash(self, replica: int = 0) -> None:
        """Send SIGKILL to one replica. A lone operator is restarted at once. One of several is
        restarted after a second, as by a kubelet, and becomes the next standby, so that the warm
        standby takes over.
        """
        async with self._turn:
            if len(self.pids) > 1:
                self._count_leader(replica)
                await self._order("crash", replica)
                return
            self.crashes += 1
            await self._order("kill", replica)
            self.pids[replica] = int(await self._order("start", replica))

    def _count_leader(self, replica: int) -> None:
        """Count a crash of the leader, but only once if two lanes strike it at the same moment: only one
        takeover follows.
        """
        leaders = self.leaders
        if leaders[-1:] == [f"replica-{replica}"] and len(leaders) > self._struck:
            self.crashes, self._struck = self.crashes + 1, len(leaders)

    async def end(self, replica: int) -> None:
        """Send SIGTERM to one replica, which hands over and is restarted."""
        async with self._turn:
            await self._order("end", replica)

    async def _order(self, word: str, replica: int) -> str:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(f"{word} {replica}\n".encode())
        async with asyncio.timeout(_START_SECONDS):
            answer = (await stdout.readline()).decode().strip()
        if not answer:
            raise AssertionError(f"the nursery ended:\n{self.said()}")
        return answer

    @property
    def ends(self) -> int:
        """How often a replica ended by itself with an error and was restarted."""
        return self.log.read_text(errors="replace").count(ENDED)

    @property
    def leaders(self) -> list[str]:
        """The replicas' names in the order in which they took the lease. (A holder is
        `name_<life>`.)
        """
        text = self.log.read_text(errors="replace")
        return re.findall(r"lease \S+ taken as (replica-\d+)_", text)

    def said(self, lines: int = 60) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


def _fork(flags: Sequence[str], config: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    from everstep_operator import __main__ as operator

    sys.argv = ["everstep-operator", "run", *flags]
    os.environ["KUBECONFIG"] = config
    status = 1
    try:
        os.setpgid(0, 0)
        os.dup2(2, 1)
        os.close(0)
        os.open(os.devnull, os.O_RDONLY)
        operator.main()
        status = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        status = end.code if isinstance(end.code, int) else 1
    finally:
        sys.stderr.flush()
        os._exit(status)


class Cot:
    """One replica. If it ends without a `kill` command, it is restarted, as by a kubelet."""

    def __init__(self, flags: Sequence[str], config: str) -> None:
        self._flags, self._config, self._pid = flags, config, 0
        self._back_at = 0.0
        """When it will be restarted (monotonic clock); 0 if no restart is due."""

    def obey(self, word: str) -> int:
        match word:
            case "start":
                self.kill()
                self._start()
            case "kill":
                self.kill()
            case "crash":
                self.kill()
                self._back_at = time.monotonic() + RESTART_SECONDS
            case "end" if self._pid:
                os.kill(self._pid, signal.SIGTERM)
        return self._pid

    def kill(self) -> None:
        self.look()
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        self._pid, self._back_at = 0, 0.0

    def look(self) -> None:
        """Record the end of the process, and restart it when that is due."""
        pid, status = os.waitpid(self._pid, os.WNOHANG) if self._pid else (0, 0)
        if pid:
            self._pid, self._back_at = 0, time.monotonic() + RESTART_SECONDS
            code = os.waitstatus_to_exitcode(status)
            print(f"{ENDED if code else HANDED_OVER} with {code}", file=sys.stderr, flush=True)
        if self._back_at and time.monotonic() >= self._back_at:
            self._start()

    def _start(self) -> None:
        self._pid, self._back_at = _fork(self._flags, self._config), 0.0


def main() -> None:
    from everstep_operator import __main__ as operator  # noqa: F401  imported once, for all

    configs = sys.argv[1].split(",")
    many = len(configs) > 1
    cots = [
        Cot([*sys.argv[2:], *([f"--identity=replica-{i}"] if many else [])], config)
        for i, config in enumerate(configs)
    ]
    while True:
        ready, _, _ = select.select([sys.stdin], [], [], 0.1)
        if not ready:
            for cot in cots:
                cot.look()
            continue
        word, _, replica = sys.stdin.readline().strip().partition(" ")
        if not word:
            for cot in cots:
                cot.kill()
            return
        print(cots[int(replica)].obey(word), flush=True)


if __name__ == "__main__":
    main()

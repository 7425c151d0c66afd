"""Operators that start at once: one process has imported `everstep_operator` and forks each of them.

What runs is `everstep_operator.__main__.main` in a process of its own, as the console script runs
it; only the import (2 s of processor time) is spared, for hundreds of starts. Ordered on standard
input, one word a line: `start` (answers the pid), `kill` (answers once it is reaped).
"""

import asyncio
import os
import select
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

ENDED = "nursery: the operator ended by itself,"
RESTART_SECONDS = 1.0
_START_SECONDS = 120.0


class Operator:
    """At most one operator at a time; all of them write to `log`. Use it with `async with`."""

    def __init__(self, flags: Sequence[str], environ: Mapping[str, str], log: Path) -> None:
        self._flags, self._environ, self.log = flags, environ, log
        self._turn = asyncio.Lock()
        self.pid = 0
        self.starts = 0

    async def __aenter__(self) -> Self:
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-u", __file__, *self._flags,
                env=dict(self._environ), stderr=log, start_new_session=True,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            )  # fmt: skip
        return self

    async def __aexit__(self, *_: object) -> None:
        """The nursery ends with its standard input, and its operator with it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()

    async def start(self) -> None:
        async with self._turn:
            self.pid = int(await self._order("start"))
            self.starts += 1

    async def kill(self) -> None:
        """SIGKILL; returns when nothing of it is left."""
        async with self._turn:
            await self._order("kill")

    async def crash(self) -> None:
        """SIGKILL, and another one at once."""
        async with self._turn:
            await self._order("kill")
            self.pid = int(await self._order("start"))
            self.starts += 1

    async def _order(self, word: str) -> str:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(word.encode() + b"\n")
        async with asyncio.timeout(_START_SECONDS):
            answer = (await stdout.readline()).decode().strip()
        if not answer:
            raise AssertionError(f"the nursery ended:\n{self.said()}")
        return answer

    @property
    def ends(self) -> int:
        """How often it ended without being killed; a new one was started then."""
        return self.log.read_text(errors="replace").count(ENDED)

    def said(self, lines: int = 60) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


def _fork(flags: Sequence[str]) -> int:
    pid = os.fork()
    if pid:
        return pid
    from everstep_operator import __main__ as operator

    sys.argv = ["everstep-operator", "run", *flags]
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
    """The one child; one that ends by itself is started again, as a kubelet would."""

    def __init__(self, flags: Sequence[str]) -> None:
        self._flags, self._pid = flags, 0

    def start(self) -> int:
        self.kill()
        self._pid = _fork(self._flags)
        return self._pid

    def kill(self) -> int:
        if self._pid:
            self.look()
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        self._pid = 0
        return 0

    def look(self) -> None:
        pid, status = os.waitpid(self._pid, os.WNOHANG) if self._pid else (0, 0)
        if not pid:
            return
        self._pid = 0
        print(f"{ENDED} with {os.waitstatus_to_exitcode(status)}", file=sys.stderr, flush=True)

    def mend(self) -> None:
        if self._pid:
            self.look()
            if not self._pid:
                time.sleep(RESTART_SECONDS)
                self.start()


def main() -> None:
    from everstep_operator import __main__ as operator  # noqa: F401  imported once, for all

    cot = Cot(sys.argv[1:])
    while True:
        ready, _, _ = select.select([sys.stdin], [], [], 0.2)
        if not ready:
            cot.mend()
            continue
        word = sys.stdin.readline().strip()
        if not word:
            cot.kill()
            return
        print(cot.start() if word == "start" else cot.kill(), flush=True)


if __name__ == "__main__":
    main()

"""Runs the documents' commands as a reader would, in a shell at the repository's root."""

import asyncio
import os
import subprocess
from collections.abc import Mapping, Sequence

from everstep_lab.seam import LabError
from everstep_stories.clusters import Cluster
from everstep_stories.documents import BY_HAND, REPOSITORY, list_commands
from everstep_stories.figures import Recorder

WATCHES = " -w"
LIMIT = 300.0


class Reader:
    """`blanks` maps the documents' placeholders to values."""

    def __init__(self, cluster: Cluster, recorder: Recorder, blanks: Mapping[str, str]) -> None:
        self._environment = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig)}
        self._recorder = recorder
        self.blanks = dict(blanks)
        self.typed: list[str] = []
        """The commands that were run, as written in the documents."""

    async def follow(self, path: str, heading: str, *, later: Sequence[str] = ()) -> None:
        """Run each command of the section that has not run yet, except those in `later`."""
        for command in list_commands((REPOSITORY / path).read_text(), heading):
            if command not in (*BY_HAND, *later, *self.typed):
                await self.type(command)

    async def type(self, command: str, *, until: str = "Running") -> str:
        """Run one command; if it watches, end it once it prints `until`. Raises LabError."""
        self.typed.append(command)
        text = command
        for blank in sorted(self.blanks, key=len, reverse=True):
            text = text.replace(blank, self.blanks[blank])
        self._recorder.say("typed", command)
        try:
            async with asyncio.timeout(LIMIT):
                if command.endswith(WATCHES):
                    return await self._watch(text, until)
                return await self._run(text)
        except TimeoutError:
            raise LabError(f"`{command}` took longer than {LIMIT:.0f} s") from None

    async def _run(self, text: str) -> str:
        shell = await self._start(text)
        try:
            out, _ = await shell.communicate()
        finally:
            _end(shell)
        said = out.decode(errors="replace")
        if shell.returncode != 0:
            raise LabError(f"`{text}` ended with {shell.returncode}: {said.strip()}")
        return said

    async def _watch(self, text: str, until: str) -> str:
        shell, seen = await self._start(f"exec {text}"), ""
        assert shell.stdout is not None
        try:
            while until not in seen:
                line = await shell.stdout.readline()
                if not line:
                    raise LabError(f"`{text}` ended before it printed {until!r}: {seen}")
                seen += line.decode(errors="replace")
        finally:
            _end(shell)
            await shell.wait()
        return seen

    async def _start(self, text: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            "bash", "-euc", text, cwd=REPOSITORY, env=self._environment,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip


def _end(shell: asyncio.subprocess.Process) -> None:
    if shell.returncode is None:
        shell.terminate()

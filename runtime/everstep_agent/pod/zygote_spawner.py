"""Starts workers by forking a zygote or, where that is not possible, as fresh interpreters.

A fault of the zygote never fails the job. It costs the seconds that a fresh interpreter takes to
import its libraries, and one line in the log that says why and what to do.
"""

import asyncio
import contextlib
import zipfile
from collections.abc import Collection, Mapping

from everstep_agent import logline
from everstep_agent.pod import output, spawn
from everstep_agent.pod.zygote import Problem, Program, Unusable, Zygote

WARM = (
    "torch",
    "numpy",
    "numpy.ma",
    "numpy.random",
    "torch.nested._internal.nested_tensor",
    "everstep",
)
"""What each worker imports until the end of its first step (measured with `sys.modules`). The first
optimizer would also import torch's compiler, but `everstep/defer_dynamo.py` prevents that.
"""
WARM_FOR_UNITS = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
)
"""The same for ranks that form units: their scripts shard the model with these modules."""
PAUSE_SECONDS = (1.0, 5.0, 20.0, 60.0)
STEADY_SECONDS = 300.0
COLD_DEATHS = 3
"""If this many zygotes in a row ended before they were warm, no more are started."""
END_SECONDS = 5.0
"""Limit for a zygote to end after SIGKILL. After it the zygote is left behind."""


class ZygoteSpawner(spawn.Spawner):
    """`fresh` starts the workers that the zygote cannot fork."""

    def __init__(self, program: Program, fresh: spawn.Spawner) -> None:
        self._program = program
        self._fresh = fresh
        self._log = logline.Log()
        self._env: Mapping[str, str] = {}
        self._zygote: Zygote | None = None
        self._why_none = ""
        self._said = ""
        self._tending: asyncio.Task[None] | None = None

    @property
    def pids(self) -> Collection[int]:
        return () if self._zygote is None else (self._zygote.pid,)

    async def open(self, env: Mapping[str, str], log: logline.Log) -> None:
        self._log, self._env = log, env
        if why := find_no_source(self._program.script):
            self._why_none = why
            return
        spawn.become_subreaper()
        self._start()
        self._tending = asyncio.create_task(self._tend())

    async def spawn(self, env: Mapping[str, str]) -> spawn.Spawned:
        try:
            if self._zygote is None:
                raise Unusable(self._why_none)
            child = await self._zygote.fork(env)
        except Unusable as why:
            self._say_unused(str(why))
            return await self._fresh.spawn(env)
        self._said = ""
        return child

    async def close(self) -> None:
        if self._tending is not None:
            self._tending.cancel()
            await asyncio.gather(self._tending, return_exceptions=True)
        if self._zygote is not None:
            self._zygote.kill()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(END_SECONDS):
                    await spawn.wait_ended(self._zygote.pid)
            spawn.reap(self._zygote.pid)
            self._zygote.close()
            self._zygote = None

    def _start(self) -> None:
        try:
            self._zygote = Zygote(self._program, self._env)
        except OSError as error:
            self._zygote, self._why_none = None, f"it cannot be started: {error}"

    # --- from start to start ---------------------------------------------------------------------

    async def _tend(self) -> None:
        """Start another zygote whenever one has ended."""
        loop = asyncio.get_running_loop()
        cold = deaths = 0
        while True:
            began = loop.time()
            warm = await self._watch()
            cold = 0 if warm else cold + 1
            deaths = 1 if loop.time() - began > STEADY_SECONDS else deaths + 1
            if cold == COLD_DEATHS:
                self._why_none += f", {cold} times before it had imported its modules"
                message = describe_unused(self._why_none, self._program.preload)
                self._log.say("zygote_given_up", message=message)
                return
            pause_seconds = PAUSE_SECONDS[min(deaths, len(PAUSE_SECONDS)) - 1]
            message = f"the zygote ended: {self._why_none}; another starts in {pause_seconds:.0f} s"
            self._log.say("zygote_ended", message=message)
            await asyncio.sleep(pause_seconds)
            self._start()

    async def _watch(self) -> bool:
        """Watch this zygote until it has ended. Returns whether it was warm."""
        zygote = self._zygote
        if zygote is None:
            return False
        said = asyncio.create_task(output.read_lines(zygote.output, self._say_output))
        try:
            await zygote.watch(lambda problems: self._warm(zygote, problems))
        finally:
            said.cancel()
            await asyncio.gather(said, return_exceptions=True)
        self._zygote, self._why_none = None, f"it {_past(spawn.describe_exit(zygote.status))}"
        zygote.close()
        return zygote.warm_after is not None

    # --- log -------------------------------------------------------------------------------------

    def _warm(self, zygote: Zygote, problems: list[Problem]) -> None:
        for problem in problems:
            named = problem.module in self._program.preload
            if named or not problem.missing:
                self._log.say(
                    "zygote_import_failed",
                    module=problem.module,
                    message=describe_problem(problem, named=named),
                )
        self._log.say("zygote_ready", pid=zygote.pid, seconds=zygote.warm_after)

    def _say_output(self, lines: list[str]) -> None:
        for line in lines:
            self._log.say("zygote_output", message=line)

    def _say_unused(self, why: str) -> None:
        """Log the reason, but only once until it changes or a worker is forked again."""
        if why != self._said:
            self._said = why
            self._log.say("zygote_unused", message=describe_unused(why, self._program.preload))


def find_no_source(script: str) -> str:
    """Why a zygote's worker cannot run this script; empty: it can."""
    with contextlib.suppress(OSError):
        if script.endswith(".pyc") or zipfile.is_zipfile(script):
            return f"{script} is no Python source, which a forked worker could run"
    return ""


def describe_problem(problem: Problem, *, named: bool) -> str:
    fix = "correct the name in --preload, or leave it out" if named else "see its traceback above"
    return (
        f"the zygote cannot import {problem.module} ({problem.error}) and goes on without it; {fix}"
    )


def describe_unused(why: str, preload: Collection[str]) -> str:
    less = f"leave out modules of --preload {','.join(preload)}, or " if preload else ""
    return (
        f"the zygote forks no worker: {why}. Workers start as fresh interpreters, which takes "
        f"seconds longer; if it stays so, {less}run with --no-zygote"
    )


def _past(exit: str) -> str:
    return f"was {exit}" if exit.startswith("killed") else exit

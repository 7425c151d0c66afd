"""The agent: PID 1 of a worker pod. It owns the worker processes, the pod's HTTP address, and
possibly the coordinator's role.
"""

import asyncio
import contextlib
import hashlib
import os
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from everstep_agent import exit_report, logline, readiness
from everstep_agent.agent_state import AgentState
from everstep_agent.api import Api
from everstep_agent.checkpoint.folder_tier import FolderTier
from everstep_agent.checkpoint.memory_tier import MemoryTier, list_left, note_of
from everstep_agent.checkpoint.unsent import unsent_of
from everstep_agent.context import Context
from everstep_agent.delivery import Delivery
from everstep_agent.identity import Identity
from everstep_agent.own_agent import OwnAgent
from everstep_agent.pace import Pace, until_grid
from everstep_agent.peers import http
from everstep_agent.peers.client import Pool
from everstep_agent.peers.follower import Follower
from everstep_agent.pod import spawn, worker_environ, zygote, zygote_spawner
from everstep_agent.pod.pod import Pod
from everstep_agent.pod.relay import Relay
from everstep_agent.role import Role
from everstep_agent.runlog.run_log import RunLog
from everstep_agent.storage import open_store
from everstep_agent.storage.errors import StoreError
from everstep_agent.storage.retrying import Retrying
from everstep_contract import env, position, report

WATCH_SECONDS = 0.25
"""Pause between two looks at this pod's workers, and at whether the agent should end. News ends it."""
QUIET_WATCH_SECONDS = 1.0
"""The same while there is no news."""
FAILURE_SECONDS = 8.0
"""How long an agent whose worker reported a failure that ends the job waits for the coordinator to
end the job with it.
"""
STUCK_SECONDS = 60.0
"""How long an agent keeps running to report that a process of its pod survives SIGKILL; then the
agent ends, too. The kubelet shows the exit report of a container only after its end, so until then
the operator learns this from the agent.
"""
CUT_OFF_SECONDS = 30.0
"""How long an agent whose workers have ended tries to reach the coordinator that the others follow. Its end is the
proof that they need to continue without it.
"""
UNJOINED_SECONDS = 300.0
"""The same for an agent that has followed no coordinator since its start, and whose workers were in no epoch. Nobody
needs its end; it only lets the operator report the fault.
"""
MARGIN_SECONDS = 3.0
"""Part of the grace period that is reserved for the shutdown itself."""
INCARNATION = "incarnation"
"""The file in the memory folder that holds the number of the container's newest start."""


class Agent:
    """One run of the container. By the time `run` returns the exit report, the report is in the
    termination log.

    Everything runs on one event loop, in the main thread, because the workers' parent-death signal
    is bound to the thread that forked them.
    """

    def __init__(
        self,
        settings: env.AgentEnv,
        spawner: spawn.Spawner,
        *,
        environ: Mapping[str, str] | None = None,
        signals: bool = False,
        line: logline.Log | None = None,
        dropped: Callable[[], int] = lambda: 0,
    ) -> None:
        self.settings = settings
        self.line = (line or logline.Log()).bind(slot=settings.slot, attempt=settings.attempt)
        self.bound = asyncio.Event()
        self._spawner = spawner
        self._dropped = dropped
        self._environ = dict(os.environ if environ is None else environ)
        self._signals = signals
        self._former = read_former(settings.memory)
        self._incarnation = count_incarnation(settings.memory)
        self._state = AgentState()
        self._ended: asyncio.Future[report.ExitReport] | None = None
        self._leave_by: float | None = None
        self._failed_at: float | None = None
        self._stuck_at: float | None = None

    # --- start and end ---------------------------------------------------------------------------

    async def run(self) -> report.ExitReport:
        """Run until the agent ends. Raises OSError if the pod's address cannot be bound."""
        self._ended = asyncio.get_running_loop().create_future()
        try:
            store = open_store(self.settings.uri, self.settings.run, self._environ)
        except StoreError as error:
            # A folder that is full, or whose server does not answer, may be usable at the next start.
            cause = report.Cause.AGENT if error.transient else report.Cause.CONFIG
            found = self._write_report(report.ExitReport(cause=cause, message=str(error)))
            self._say_end(found)
            return found
        async with contextlib.AsyncExitStack() as stack:
            await self._open(store, stack)
            # Written before the workers end: a worker that never ends must not delay the report.
            found = self._write_report(await self._ended)
            await self._role.linger()
            await self.pod.workers.end_all()
            if found.cause is report.Cause.DONE:
                await self.pod.clear_disk()
        self._say_end(found)
        return found

    def _say_end(self, found: report.ExitReport) -> None:
        self.line.say("agent_ends", cause=found.cause.value, step=found.step, message=found.message)

    async def _open(self, store: Retrying, stack: contextlib.AsyncExitStack) -> None:
        await self._open_address(stack)
        self._build(store)
        stack.push_async_callback(self.pod.relay.close)
        stack.push_async_callback(self.pod.close)
        stack.push_async_callback(self._follower.close)
        self._routes.update(self._api.routes())
        if self._signals:
            self._catch_signals()
        await self.pod.open()
        self.line.say(
            "agent_ready",
            address=self.me.address,
            incarnation=self.me.incarnation,
            adopted=",".join(str(save.step) for save in self.pod.memory.list_saves()),
        )
        self.bound.set()
        for work in (
            self._follower.run(),
            self._watch(),
            self._watch_progress(),
            self._delivery.run(),
            self._role.read_ahead(),
        ):
            task = asyncio.create_task(work)
            task.add_done_callback(self._task_ended)
            stack.push_async_callback(_cancel, task)

    async def _open_address(self, stack: contextlib.AsyncExitStack) -> None:
        """Bind the pod's address before anything else, because the agent's identity contains the
        port. Until the API exists, the server answers only the health check.
        """
        settings = self.settings
        self._routes: dict[str, http.Handler] = {}
        server = http.Server(settings.token, self._routes, self._log_server)
        await server.open(settings.pod_ip, settings.port)
        stack.push_async_callback(server.close)
        self.me = Identity(
            slot=settings.slot,
            attempt=settings.attempt,
            incarnation=self._incarnation,
            address=server.address,
        )
        self._pool = Pool(settings.token)
        stack.push_async_callback(self._pool.close)

    def _log_server(self, message: str) -> None:
        self.line.say("http_server", message=message)

    def _build(self, store: Retrying) -> None:
        folder = Path(self.settings.memory)
        context = Context(
            settings=self.settings,
            me=self.me,
            store=store,
            run_log=RunLog(store),
            memory=MemoryTier(folder / "restore", folder / "staging"),
            disk=build_disk_tier(self.settings),
            line=self.line,
            dropped=self._dropped,
        )
        relay = Relay(self._pool, self.line)
        self._delivery = Delivery(
            state=self._state,
            pool=self._pool,
            parts=lambda: self.pod.saves.parts,
            line=self.line,
        )
        self.pod = Pod(
            context,
            spawner=self._spawner,
            environ=worker_environ.build(self._environ, self.settings.workers),
            relay=relay,
            on_part=self._delivery.wake,
            former=self._former,
        )
        own = OwnAgent(self.me, self._state, self.pod)
        self._role = Role(context, self._state, own)
        self._follower = Follower(own, self.settings.token, self._role.act, self.line)
        self._api = Api(self.settings.run, self._state, own, self._pool)

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.leave)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # `cli.py` has blocked it
        loop.add_signal_handler(signal.SIGINT, self.leave)
        loop.add_signal_handler(
            signal.SIGCHLD, lambda: spawn.reap_orphans(self.pod.workers.processes.pids)
        )

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        text = f"{type(error).__name__}: {error}"
        trace = "".join(traceback.format_exception(error))
        self.line.say("agent_error", message=text)
        self._end(
            report.ExitReport(
                cause=report.Cause.AGENT, message=f"the agent failed: {text}", traceback=trace
            )
        )

    def leave(self) -> None:
        """Called on SIGTERM: save, and end within the grace period."""
        if self._leave_by is not None:
            return
        grace = max(1.0, self.settings.grace_seconds - MARGIN_SECONDS)
        self._leave_by = time.monotonic() + grace
        self.line.say("leaving", reason="SIGTERM", within_s=round(grace))
        self.pod.leave(self._leave_by)

    def _end(self, found: report.ExitReport) -> None:
        if self._ended is not None and not self._ended.done():
            self.pod.holds.quiet = True
            self._ended.set_result(found)

    def _write_report(self, found: report.ExitReport) -> report.ExitReport:
        found = replace(
            found,
            slot=self.settings.slot,
            attempt=self.settings.attempt,
            incarnation=self._incarnation,
        )
        try:
            Path(self.settings.termination_log).write_bytes(report.encode(found))
        except OSError as error:
            self.line.say("no_exit_report", path=self.settings.termination_log, message=str(error))
        return found

    # --- watching --------------------------------------------------------------------------------

    async def _watch(self) -> None:
        pace = Pace(WATCH_SECONDS, QUIET_WATCH_SECONDS)
        while True:
            now = time.monotonic()
            self.pod.look(now)
            found = self._decide_end(now)
            if found is not None:
                self._end(found)
                return
            if self._leave_by is not None:
                pace.note_news()
            self.pod.news.to_look.clear()
            await pace.wait_for_news(self.pod.news.to_look)

    async def _watch_progress(self) -> None:
        while True:
            pause_seconds = self.pod.look_at_progress()
            await asyncio.sleep(until_grid(pause_seconds, time.monotonic()))

    def _decide_end(self, now: float) -> report.ExitReport | None:
        me, state = self.me, self._state
        if state.published is not None and state.published.end is not None:
            return exit_report.from_end(state.published.end)
        ours = state.coordinator if self._leave_by is None else None
        over = ours.term.why_over if ours else ""
        fenced = exit_report.decide_fenced(state.wanted, me.slot, me.attempt, over)
        if fenced is not None:
            return self._stuck(now, ends=True) or fenced
        if (ended := self._count_ended()) >= self._incarnation:
            # This start's right number, from which the next one counts on.
            write_incarnation(self.settings.memory, ended + 1)
            return exit_report.miscounted(self._incarnation, ended)
        deaths = self.pod.deaths
        if deaths.stuck is not None:
            return self._stuck(now, ends=self._leave_by is not None)
        if deaths.fatal is not None and self.pod.workers.group_over():
            return exit_report.from_failure(deaths.fatal)
        if deaths.failure is not None and self.pod.workers.group_over():
            self._failed_at = self._failed_at or now
            if now - self._failed_at > FAILURE_SECONDS:
                return exit_report.from_failure(deaths.failure)
        if self._leave_by is None:
            return self._find_cut_off()
        left = exit_report.decide_left(state.published, me.slot, me.attempt)
        alone = not self._state.following and state.coordinator is None
        if left is None and alone and self.pod.workers.group_over():
            return exit_report.left_alone()
        if left is None and now > self._leave_by:
            return exit_report.left_late(self.pod.list_copied())
        return left

    def _count_ended(self) -> int:
        """How many starts of this container have ended, as far as the kubelet has reported."""
        dead = self._state.wanted.dead
        return max((d.incarnation for d in dead if (d.slot, d.attempt) == self.me.place), default=0)

    def _find_cut_off(self) -> report.ExitReport | None:
        workers = self.pod.workers
        joined = self._state.followed or bool(workers.current)
        seconds = CUT_OFF_SECONDS if joined else UNJOINED_SECONDS
        unreached = self._state.find_unreached(self.me.address, seconds)
        over = bool(unreached) and workers.group_over()
        return exit_report.cut_off(unreached, joined=joined) if over else None

    def _stuck(self, now: float, *, ends: bool) -> report.ExitReport | None:
        """Return the exit report if a process survives SIGKILL and the agent must end now;
        otherwise None. Write the report as soon as such a process is known, even if the agent ends
        later.
        """
        stuck = self.pod.deaths.stuck
        if stuck is None:
            return None
        found = exit_report.from_failure(stuck)
        if self._stuck_at is None:
            self._stuck_at = now
            self._write_report(found)
        return found if ends or now - self._stuck_at > STUCK_SECONDS else None


def build_disk_tier(settings: env.AgentEnv) -> FolderTier | None:
    """All pods of a job on one node share one folder. Runs of one name may be in several stores, and
    each deletes what it does not know in its folder.
    """
    if not settings.disk_tier:
        return None
    run = f"{settings.uri}/{settings.run}"
    name = f"{settings.run.replace('/', '_')}-{hashlib.sha256(run.encode()).hexdigest()[:8]}"
    return FolderTier(Path(settings.disk_tier) / name, "disk", run=run, sync=True)


def read_former(memory: str) -> position.Position | None:
    """The position of the furthest worker before the container's last restart, read from a folder
    that survives restarts.
    """
    found = []
    for path in Path(memory).glob("position-*"):
        with contextlib.suppress(OSError, ValueError):
            page = position.PositionPage(str(path))
            found.append(page.read())
            page.close()
    return max(found, key=lambda p: (p.epoch, p.applied), default=None)


def count_incarnation(memory: str) -> int:
    """Return the number of this start of the container, counted in a folder that survives restarts.
    Free the memory that the previous start left behind, except for staged saves whose chunks are
    known.
    """
    folder = Path(memory)
    folder.mkdir(parents=True, exist_ok=True)
    held = list_left(folder / "staging")
    kept = {path for file in held for path in (file, note_of(file), unsent_of(file))}
    for stale in {*folder.glob("position-*"), *folder.glob("staging/*")} - kept:
        stale.unlink(missing_ok=True)
    try:
        number = int((folder / INCARNATION).read_text()) + 1
    except (FileNotFoundError, ValueError):
        number = 1
    write_incarnation(memory, number)
    return number


def write_incarnation(memory: str, number: int) -> None:
    """Note the number of this start of the container."""
    path = Path(memory, INCARNATION)
    part = path.with_name(f"{INCARNATION}.part")
    part.write_text(str(number))
    part.replace(path)


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def run_agent(
    settings: env.AgentEnv, script: str, args: list[str], dropped: Callable[[], int]
) -> int:
    """The container's main process; `dropped` as in `Context`. Returns the exit status."""
    spawn.become_subreaper()
    readiness.get_ready()
    try:
        spawner = build_spawner(settings, script, args)
        agent = Agent(settings, spawner, signals=True, dropped=dropped)
        found = asyncio.run(agent.run())
    except OSError as error:
        found = _cannot_begin(settings, error)
    return found.exit_code()


def build_spawner(settings: env.AgentEnv, script: str, args: list[str]) -> spawn.Spawner:
    limits = spawn.raise_open_files()
    fresh = spawn.SubprocessSpawner(script, args, limits)
    if settings.zygote == 0:
        return fresh
    return zygote_spawner.ZygoteSpawner(build_program(settings, script, args, limits), fresh)


def build_program(
    settings: env.AgentEnv, script: str, args: list[str], limits: spawn.Limits
) -> zygote.Program:
    return zygote.Program(
        script=script,
        args=tuple(args),
        warm=_choose_warm(settings),
        preload=_split(settings.preload or ""),
        open_files=limits,
    )


def _choose_warm(settings: env.AgentEnv) -> tuple[str, ...]:
    if settings.warm is not None:
        return _split(settings.warm)
    return zygote_spawner.WARM + (zygote_spawner.WARM_FOR_UNITS if settings.mesh.unit > 1 else ())


def _split(modules: str) -> tuple[str, ...]:
    return tuple(filter(None, modules.split(",")))


def _cannot_begin(settings: env.AgentEnv, error: OSError) -> report.ExitReport:
    """The memory folder is missing or full, or the address cannot be bound: the container's next
    start may succeed.
    """
    text = (
        f"the agent cannot start with {settings.memory} and {settings.pod_ip}:{settings.port}: "
        f"{error}"
    )
    found = report.ExitReport(
        cause=report.Cause.AGENT, message=text, slot=settings.slot, attempt=settings.attempt
    )
    logline.Log().say("agent_error", message=text)
    with contextlib.suppress(OSError):
        Path(settings.termination_log).write_bytes(report.encode(found))
    return found

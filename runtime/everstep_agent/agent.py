"""The agent: PID 1 of a worker pod. It has the workers' lives, the pod's HTTP address, and perhaps
the coordinator's role.
"""

import asyncio
import contextlib
import os
import signal
import time
import traceback
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from everstep_agent import ending, http, logline, spawn
from everstep_agent.api import Api
from everstep_agent.delivery import Delivery
from everstep_agent.desk import Identity
from everstep_agent.follower import Follower
from everstep_agent.messages import AgentReport, Levels, Who
from everstep_agent.peers import Pool
from everstep_agent.pod import Pod
from everstep_agent.relay import Relay
from everstep_agent.role import Role
from everstep_agent.standing import Standing
from everstep_agent.storage import open_store
from everstep_agent.storage.errors import StoreError
from everstep_agent.storage.retrying import Retrying
from everstep_contract import env, position, report

WATCH_SECONDS = 0.25
FAILURE_SECONDS = 8.0
"""How long an agent with a failure of its own waits for the coordinator to end the job with it."""
MARGIN_SECONDS = 3.0
"""Kept of the grace period for the way out."""


class Agent:
    """One container's life. `run` returns the exit report; it stands in the termination log by then.

    Everything runs on one event loop, in the main thread: the workers' parent-death signal follows
    the thread that forked them.
    """

    def __init__(
        self,
        settings: env.AgentEnv,
        spawner: spawn.Spawner,
        *,
        environ: Mapping[str, str] | None = None,
        signals: bool = False,
        line: logline.Log | None = None,
    ) -> None:
        self.settings = settings
        self.line = (line or logline.Log()).bind(slot=settings.slot, attempt=settings.attempt)
        self.bound = asyncio.Event()
        self._spawner = spawner
        self._environ = dict(os.environ if environ is None else environ)
        self._signals = signals
        self._former = read_former(settings.memory)
        self._incarnation = count_incarnation(settings.memory)
        self._standing = Standing()
        self._ended: asyncio.Future[report.ExitReport] | None = None
        self._leave_by: float | None = None
        self._failed_at: float | None = None

    # --- life ------------------------------------------------------------------------------------

    async def run(self) -> report.ExitReport:
        """Raises OSError if the pod's address cannot be bound."""
        self._ended = asyncio.get_running_loop().create_future()
        try:
            store = open_store(self.settings.uri, self.settings.run, self._environ)
        except StoreError as error:
            return self._write_report(
                report.ExitReport(cause=report.Cause.CONFIG, message=str(error))
            )
        async with contextlib.AsyncExitStack() as stack:
            await self._open(store, stack)
            found = await self._ended
            await self._role.linger()
            await self.pod.workers.end_all()
        return self._write_report(found)

    async def _open(self, store: Retrying, stack: contextlib.AsyncExitStack) -> None:
        await self._open_address(stack)
        self._build(store)
        stack.push_async_callback(self._relay.close)
        stack.push_async_callback(self.pod.close)
        stack.push_async_callback(self._follower.close)
        self._routes.update(self._api.routes())
        if self._signals:
            self._catch_signals()
        await self.pod.open()
        self.line.say("agent_ready", address=self.me.address, incarnation=self.me.incarnation)
        self.bound.set()
        for work in (self._follower.run(), self._watch(), self._delivery.run()):
            task = asyncio.create_task(work)
            task.add_done_callback(self._task_ended)
            stack.push_async_callback(_cancel, task)

    async def _open_address(self, stack: contextlib.AsyncExitStack) -> None:
        """Who we are depends on the port that we get; until then only health is answered."""
        settings = self.settings
        self._routes: dict[str, http.Handler] = {}
        server = http.Server(settings.token, self._routes)
        await server.open(settings.pod_ip, settings.port)
        stack.push_async_callback(server.close)
        self.me = Identity(
            slot=settings.slot,
            attempt=settings.attempt,
            incarnation=self._incarnation,
            address=f"{settings.pod_ip}:{server.port}",
        )
        self._pool = Pool(settings.token)
        stack.push_async_callback(self._pool.close)

    def _build(self, store: Retrying) -> None:
        self._relay = Relay(self._pool)
        self._delivery = Delivery(
            standing=self._standing,
            pool=self._pool,
            parts=lambda: self.pod.uploads.parts if self.pod.uploads else {},
            following=self._following,
            line=self.line,
        )
        self.pod = Pod(
            settings=self.settings,
            me=self.me,
            store=store,
            spawner=self._spawner,
            environ=worker_environ(self._environ),
            relay=self._relay,
            on_part=self._delivery.wake,
            line=self.line,
            former=self._former,
        )
        self._role = Role(
            settings=self.settings,
            me=self.me,
            store=store,
            standing=self._standing,
            report=self._report,
            changed=self.pod.changed,
            on_levels=self._on_levels,
            line=self.line,
        )
        self._follower = Follower(
            me=self.me,
            token=self.settings.token,
            ready=lambda: self._standing.informed,
            who=self._who,
            peers=self._standing.peers,
            report=self._report,
            changed=self.pod.changed,
            on_levels=self._on_levels,
            heard=lambda: self._standing.epoch,
            act=self._role.act,
            line=self.line,
        )
        self._api = Api(
            run=self.settings.run,
            standing=self._standing,
            pool=self._pool,
            who=self._who,
            following=self._following,
            apply=self.pod.apply,
        )

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.leave)
        loop.add_signal_handler(signal.SIGINT, self.leave)
        loop.add_signal_handler(signal.SIGCHLD, lambda: spawn.reap_orphans(self.pod.workers.pids))

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
        """SIGTERM: save and go within the grace period."""
        if self._leave_by is not None:
            return
        grace = max(1.0, self.settings.grace_seconds - MARGIN_SECONDS)
        self._leave_by = time.monotonic() + grace
        self.pod.leaving = True
        self.line.say("leaving", reason="SIGTERM", within_s=round(grace))
        self.pod.changed.set()

    def _end(self, found: report.ExitReport) -> None:
        if self._ended is not None and not self._ended.done():
            self.pod.quiet = True
            self._ended.set_result(found)

    def _write_report(self, found: report.ExitReport) -> report.ExitReport:
        found = replace(
            found,
            slot=self.settings.slot,
            attempt=self.settings.attempt,
            incarnation=self._incarnation,
        )
        self.line.say("agent_ends", cause=found.cause.value, step=found.step, message=found.message)
        try:
            Path(self.settings.termination_log).write_bytes(report.encode(found))
        except OSError as error:
            self.line.say("no_exit_report", path=self.settings.termination_log, message=str(error))
        return found

    # --- watching --------------------------------------------------------------------------------

    async def _watch(self) -> None:
        while True:
            now = time.monotonic()
            self.pod.check_hangs(now)
            found = self._decide_end(now)
            if found is not None:
                self._end(found)
                return
            await asyncio.sleep(WATCH_SECONDS)

    def _decide_end(self, now: float) -> report.ExitReport | None:
        me, standing = self.me, self._standing
        if standing.published is not None and standing.published.end is not None:
            return ending.from_end(standing.published.end)
        ours = standing.coordinator if self._leave_by is None else None
        over = ours.desk.over if ours else ""
        fenced = ending.decide_fenced(standing.wanted, me.slot, me.attempt, over)
        if fenced is not None:
            return fenced
        if self.pod.fatal is not None:
            return ending.from_failure(self.pod.fatal)
        if self.pod.failure is not None and self.pod.workers.group_over():
            self._failed_at = self._failed_at or now
            if now - self._failed_at > FAILURE_SECONDS:
                return ending.from_failure(self.pod.failure)
        if self._leave_by is None:
            return None
        left = ending.decide_left(standing.published, me.slot, me.attempt)
        alone = not self._following() and standing.coordinator is None
        if left is None and alone and self.pod.workers.group_over():
            return ending.left_alone()
        if left is None and now > self._leave_by:
            return ending.left_late()
        return left

    # --- what our parts ask of each other --------------------------------------------------------

    def _on_levels(self, published: Levels) -> None:
        self._standing.take_published(published)
        coordinator = self._standing.coordinator
        self._relay.target = coordinator.desk.group if coordinator else published.address
        self.pod.apply(published)

    def _following(self) -> str:
        return self._follower.following

    def _report(self) -> AgentReport:
        return self.pod.build_report(time.monotonic())

    def _who(self) -> Who:
        coordinator = self._standing.coordinator
        return Who(
            slot=self.me.slot,
            attempt=self.me.attempt,
            acting=coordinator is not None and not coordinator.desk.ended,
            epoch=self.pod.epoch,
            coordinator=self._following(),
            candidate=not self.pod.leaving and self._standing.may_coordinate(self.me),
        )


def worker_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """What the user's code gets: everything but the job's token."""
    return {k: v for k, v in environ.items() if k != env.PREFIX + "TOKEN"}


def read_former(memory: str) -> position.Position | None:
    """Where the furthest worker of the container's last life stood; the folder outlives it."""
    found = []
    for path in Path(memory).glob("position-*"):
        with contextlib.suppress(OSError, ValueError):
            page = position.PositionPage(str(path))
            found.append(page.read())
            page.close()
    return max(found, key=lambda p: (p.epoch, p.applied), default=None)


def count_incarnation(memory: str) -> int:
    """The number of this life of the container: the folder outlives it. Clears what the last life
    left, which gives room.
    """
    folder = Path(memory)
    folder.mkdir(parents=True, exist_ok=True)
    for stale in [*folder.glob("position-*"), *folder.glob("staging/*")]:
        stale.unlink(missing_ok=True)
    path = folder / "incarnation"
    try:
        number = int(path.read_text()) + 1
    except (FileNotFoundError, ValueError):
        number = 1
    part = folder / "incarnation.part"
    part.write_text(str(number))
    part.replace(path)
    return number


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def run_agent(settings: env.AgentEnv, script: str, args: list[str]) -> int:
    """The container's main process. Returns the exit status."""
    spawn.become_subreaper()
    try:
        agent = Agent(settings, spawn.SubprocessSpawner(script, args), signals=True)
        found = asyncio.run(agent.run())
    except OSError as error:
        found = _cannot_begin(settings, error)
    return found.exit_code()


def _cannot_begin(settings: env.AgentEnv, error: OSError) -> report.ExitReport:
    """No folder in memory, no room in it, or no address: another life of the container may have it."""
    text = f"the agent cannot begin with {settings.memory} and {settings.pod_ip}:{settings.port}: {error}"
    found = report.ExitReport(
        cause=report.Cause.AGENT, message=text, slot=settings.slot, attempt=settings.attempt
    )
    logline.Log().say("agent_error", message=text)
    with contextlib.suppress(OSError):
        Path(settings.termination_log).write_bytes(report.encode(found))
    return found

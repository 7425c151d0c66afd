"""The agent: PID 1 of a worker pod. It has the workers' lives, the pod's HTTP address, and perhaps
the coordinator's role.
"""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path

from everstep_agent import ending, http, logline, spawn
from everstep_agent.checkpoint.parts import Part
from everstep_agent.coordinator import Coordinator
from everstep_agent.desk import Identity
from everstep_agent.follower import Follower
from everstep_agent.messages import Accepted, After, AgentReport, Levels, StoreCall, Who
from everstep_agent.peers import PeerError, Pool
from everstep_agent.pod import Pod
from everstep_agent.relay import Relay, answer_call
from everstep_agent.storage import open_store
from everstep_agent.storage.retrying import Retrying
from everstep_contract import codec, env, levels, report

WATCH_SECONDS = 0.25
REPORT_SECONDS = 0.1
LINGER_SECONDS = 5.0
"""How long the coordinator stays after the end, so that operator and agents can hear of it."""
HANDOVER_SECONDS = 1.0
"""The same when only its own pod leaves: others take over."""
FAILURE_SECONDS = 8.0
"""How long an agent with a failure of its own waits for the coordinator to end the job with it."""
MARGIN_SECONDS = 3.0
"""Kept of the grace period for the way out."""
OLD_WANTED_SECONDS = 10.0
"""A lower revision than ours counts when ours was not repeated for so long: another operator has
started.
"""


class Agent:
    """One container's life. `run` returns the exit report; it is also in the termination log by
    then.
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
        environ = dict(os.environ if environ is None else environ)
        incarnation = count_incarnation(settings.memory)
        self.settings = settings
        self.line = (line or logline.Log()).bind(slot=settings.slot, attempt=settings.attempt)
        self._signals = signals
        self._environ = environ
        self._spawner = spawner
        self._incarnation = incarnation
        self._wanted = levels.Wanted()
        self._wanted_at = 0.0
        self._published: Levels | None = None
        self._coordinator: Coordinator | None = None
        self._ended: asyncio.Future[report.ExitReport] | None = None
        self._leave_by: float | None = None
        self._failed_at: float | None = None
        self._parts: asyncio.Queue[Part] = asyncio.Queue()
        self.bound = asyncio.Event()

    # --- life ------------------------------------------------------------------------------------

    async def run(self) -> report.ExitReport:
        self._ended = asyncio.get_running_loop().create_future()
        try:
            store = open_store(self.settings.uri, self.settings.run, self._environ)
        except Exception as error:  # whatever it is, the report must name it
            return self._write_report(
                report.ExitReport(cause=report.Cause.CONFIG, message=str(error))
            )
        async with contextlib.AsyncExitStack() as stack:
            await self._open(store, stack)
            found = await self._ended
            await self._linger()
            self.pod.quiet = True
            await self.pod.workers.end_all()
        return self._write_report(found)

    async def _open(self, store: Retrying, stack: contextlib.AsyncExitStack) -> None:
        settings = self.settings
        self._server = http.Server(settings.token, self._routes())
        await self._server.open(settings.pod_ip, settings.port)
        stack.push_async_callback(self._server.close)
        self.me = Identity(
            slot=settings.slot,
            attempt=settings.attempt,
            incarnation=self._incarnation,
            address=f"{settings.pod_ip}:{self._server.port}",
        )
        self._store = store
        self._pool = Pool(settings.token)
        stack.push_async_callback(self._pool.close)
        self._relay = Relay(self._pool)
        stack.push_async_callback(self._relay.close)
        self.pod = Pod(
            settings=settings,
            me=self.me,
            store=store,
            spawner=self._spawner,
            environ=worker_environ(self._environ),
            relay=self._relay,
            on_part=self._parts.put_nowait,
            line=self.line,
        )
        stack.push_async_callback(self.pod.close)
        self._follower = Follower(
            me=self.me,
            token=settings.token,
            ready=lambda: self._wanted_at > 0 or self._published is not None,
            who=self._who,
            peers=self._peers,
            report=self._report,
            changed=self.pod.changed,
            on_levels=self._on_levels,
            act=self._act,
            line=self.line,
        )
        stack.push_async_callback(self._follower.close)
        if self._signals:
            self._catch_signals()
        await self.pod.open()
        self.line.say("agent_ready", address=self.me.address, incarnation=self.me.incarnation)
        self.bound.set()
        for work in (self._follower.run(), self._watch(), self._send_parts()):
            task = asyncio.create_task(work)
            task.add_done_callback(self._task_ended)
            stack.push_async_callback(_cancel, task)

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.leave)
        loop.add_signal_handler(signal.SIGINT, self.leave)
        loop.add_signal_handler(signal.SIGCHLD, lambda: spawn.reap_orphans(self.pod.workers.pids))

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            self.line.say("agent_error", message=f"{type(error).__name__}: {error}")
            text = f"the agent failed: {type(error).__name__}: {error}"
            self._end(
                report.ExitReport(cause=report.Cause.AGENT, message=text, traceback=_trace(error))
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

    async def _linger(self) -> None:
        """A coordinator's word must be heard: by every agent that follows it, and by the operator."""
        if self._coordinator is None:
            return
        desk = self._coordinator.desk
        seconds = LINGER_SECONDS if desk.ended else HANDOVER_SECONDS
        before, until = desk.seen_served, time.monotonic() + seconds
        others = {r.address for r in desk.reports.recent(time.monotonic(), 3.0)} - {self.me.address}
        while time.monotonic() < until:
            version = desk.board.levels.version
            if desk.seen_served > before and all(
                desk.board.read.get(a, 0) >= version for a in others
            ):
                return
            await asyncio.sleep(0.05)

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
        me, published = self.me, self._published
        if published is not None and published.end is not None:
            return ending.from_end(published.end)
        fenced = ending.decide_fenced(self._known_wanted(), me.slot, me.attempt)
        if fenced is not None:
            return fenced
        if self.pod.failure is not None and self.pod.workers.group_over():
            self._failed_at = self._failed_at or now
            if now - self._failed_at > FAILURE_SECONDS:
                return ending.from_failure(self.pod.failure)
        if self._leave_by is None:
            return None
        left = ending.decide_left(published, me.slot, me.attempt)
        if left is not None:
            return left
        nobody = not self._follower.following and self._coordinator is None
        if nobody and self.pod.epoch == 0:
            return report.ExitReport(cause=report.Cause.LEFT, message="left before it began")
        if now > self._leave_by:
            text = "left without a commit: the grace period was too short or the store is away"
            return report.ExitReport(cause=report.Cause.LEFT, message=text)
        return None

    # --- levels ----------------------------------------------------------------------------------

    def _on_levels(self, published: Levels) -> None:
        self._published = published
        self._wanted = newer_wanted(self._wanted, published.wanted)
        coordinator = self._coordinator
        self._relay.target = coordinator.desk.group if coordinator else published.address
        self.pod.apply(published)

    def _known_wanted(self) -> levels.Wanted:
        return self._wanted

    def _report(self) -> AgentReport:
        return self.pod.build_report(time.monotonic())

    def _who(self) -> Who:
        return Who(
            slot=self.me.slot,
            attempt=self.me.attempt,
            acting=self._coordinator is not None and not self._coordinator.desk.ended,
            epoch=self.pod.epoch,
            coordinator=self._follower.following,
            candidate=not self.pod.leaving and self.me.slot not in self._wanted.leave,
        )

    def _peers(self) -> dict[str, levels.SlotAttempt]:
        found = {
            p.address: levels.SlotAttempt(slot=p.slot, attempt=p.attempt)
            for p in self._wanted.peers
        }
        epoch = self._published.epoch if self._published else None
        for m in epoch.members if epoch else ():
            found.setdefault(m.address, levels.SlotAttempt(slot=m.slot, attempt=m.attempt))
        return found

    # --- the coordinator's role ------------------------------------------------------------------

    async def _act(self, has_rival: Callable[[], Awaitable[bool]]) -> None:
        """Coordinate until the job ends, or another coordinator precedes us, or we leave."""
        coordinator = Coordinator(
            settings=self.settings,
            me=self.me,
            store=self._store,
            line=self.line.bind(role="coordinator"),
            inherited=self._published,
            wanted=self._wanted,
        )
        self._coordinator = coordinator
        self.line.say("coordinates", address=self.me.address)
        tasks = [
            asyncio.create_task(coordinator.run()),
            asyncio.create_task(self._follow_myself(coordinator)),
            asyncio.create_task(self._until_yielded(coordinator, has_rival)),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0].done():
                tasks[0].result()
                await self._ended_forever()
            for task in tasks[1:]:
                if task.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await coordinator.close()
            self._coordinator = None
            self.line.say("lays_role_down")

    async def _ended_forever(self) -> None:
        """The last levels stay published until this agent ends."""
        await asyncio.Event().wait()

    async def _follow_myself(self, coordinator: Coordinator) -> None:
        """The coordinator's own agent takes no other way than the others, only a shorter one."""

        async def hear() -> None:
            version = -1
            while True:
                published = await coordinator.desk.board.wait_newer(version)
                version = published.version
                self._on_levels(published)

        async def tell() -> None:
            while True:
                self.pod.changed.clear()
                coordinator.desk.take(self._report())
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.pod.changed.wait(), REPORT_SECONDS)

        async with asyncio.TaskGroup() as group:
            group.create_task(hear())
            group.create_task(tell())

    async def _until_yielded(
        self, coordinator: Coordinator, has_rival: Callable[[], Awaitable[bool]]
    ) -> None:
        while True:
            await asyncio.sleep(1.0)
            desk = coordinator.desk
            mine = (self.me.slot, self.me.attempt)
            gone = any((x.slot, x.attempt) == mine for x in desk.left)
            others = [a for a in self._peers() if a != self.me.address]
            if gone and others and not desk.ended:
                return
            if desk.epoch is None and not desk.ended and await has_rival():
                return

    async def _send_parts(self) -> None:
        """Uploaded parts go to the coordinator; to a new one again, as long as they are not
        committed.
        """
        sent: dict[tuple[int, int, int], str] = {}
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._parts.get(), 1.0)
            uploads = self.pod.uploads
            for key, part in list(uploads.parts.items()) if uploads else []:
                target = self.me.address if self._coordinator else self._follower.following
                if target and sent.get(key) != target and await self._send_part(part, target):
                    sent[key] = target

    async def _send_part(self, part: Part, target: str) -> bool:
        if self._coordinator is not None:
            self._coordinator.desk.add_part(part)
            return True
        try:
            answer = await self._pool.call(target, "/v1/part", part, Accepted, timeout=60.0)
        except PeerError as error:
            self.line.say("part_waits", step=part.step, message=str(error))
            return False
        return answer.acting

    # --- HTTP ------------------------------------------------------------------------------------

    def _routes(self) -> dict[str, http.Handler]:
        return {
            "/v1/wanted": self._post_wanted,
            "/v1/relayed-wanted": self._post_relayed_wanted,
            "/v1/who": self._post_who,
            "/v1/report": self._post_report,
            "/v1/levels": self._post_levels,
            "/v1/part": self._post_part,
            "/v1/store": self._post_store,
        }

    async def _post_wanted(self, body: bytes) -> bytes:
        await self._take_wanted(codec.loads(levels.Wanted, body))
        return codec.dumps(await self._seen(body))

    async def _post_relayed_wanted(self, body: bytes) -> bytes:
        await self._take_wanted(codec.loads(levels.Wanted, body))
        return codec.dumps(self._own_seen())

    async def _take_wanted(self, wanted: levels.Wanted) -> None:
        now = time.monotonic()
        if wanted.revision < self._wanted.revision and now - self._wanted_at < OLD_WANTED_SECONDS:
            return
        self._wanted, self._wanted_at = wanted, now
        if self._coordinator is not None:
            self._coordinator.desk.want(wanted)
        elif self._published is not None:
            self.pod.apply(replace(self._published, wanted=wanted))

    async def _seen(self, body: bytes) -> levels.Seen:
        target = self._follower.following
        if self._coordinator is None and target:
            with contextlib.suppress(PeerError):
                wanted = codec.loads(levels.Wanted, body)
                return await self._pool.call(
                    target, "/v1/relayed-wanted", wanted, levels.Seen, timeout=1.5
                )
        return self._own_seen()

    def _own_seen(self) -> levels.Seen:
        if self._coordinator is not None:
            self._coordinator.desk.seen_served += 1
            return self._coordinator.desk.build_seen()
        if self._published is not None:
            return self._published.seen
        return levels.Seen(run=self.settings.run)

    async def _post_who(self, body: bytes) -> bytes:
        return codec.dumps(self._who())

    async def _post_report(self, body: bytes) -> bytes:
        found = codec.loads(AgentReport, body)
        if self._coordinator is not None:
            self._coordinator.desk.take(found)
        return codec.dumps(Accepted(acting=self._coordinator is not None))

    async def _post_levels(self, body: bytes) -> bytes:
        after = codec.loads(After, body)
        coordinator = self._coordinator
        if coordinator is None:
            raise codec.DecodeError("this agent does not coordinate; ask /v1/who")
        return codec.dumps(await coordinator.desk.board.wait_newer(after.version, after.reader))

    async def _post_part(self, body: bytes) -> bytes:
        part = await asyncio.to_thread(codec.loads, Part, body)
        if self._coordinator is not None:
            self._coordinator.desk.add_part(part)
        return codec.dumps(Accepted(acting=self._coordinator is not None))

    async def _post_store(self, body: bytes) -> bytes:
        call = codec.loads(StoreCall, body)
        if self._coordinator is None:
            raise codec.DecodeError("this agent does not coordinate; ask /v1/who")
        return codec.dumps(await answer_call(self._coordinator.desk.group, call))


def newer_wanted(held: levels.Wanted, found: levels.Wanted) -> levels.Wanted:
    return found if found.revision >= held.revision else held


def worker_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """What the user's code gets: everything but the job's token."""
    return {k: v for k, v in environ.items() if k != env.PREFIX + "TOKEN"}


def count_incarnation(memory: str) -> int:
    """The number of this life of the container: the folder outlives it. Clears what the last life
    left.
    """
    folder = Path(memory)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "incarnation"
    try:
        number = int(path.read_text()) + 1
    except (FileNotFoundError, ValueError):
        number = 1
    part = folder / "incarnation.part"
    part.write_text(str(number))
    part.replace(path)
    for stale in [*folder.glob("position-*"), *folder.glob("staging/*")]:
        stale.unlink(missing_ok=True)
    return number


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _trace(error: BaseException) -> str:
    import traceback

    return "".join(traceback.format_exception(error))


def run_agent(settings: env.AgentEnv, script: str, args: list[str]) -> int:
    """The container's main process. Returns the exit status."""
    spawn.become_subreaper()
    agent = Agent(settings, spawn.SubprocessSpawner(script, args), signals=True)
    found = asyncio.run(agent.run())
    if found.cause not in (report.Cause.DONE, report.Cause.LEFT, report.Cause.STOPPED):
        print(f"everstep: {found.cause.value}: {found.message}", file=sys.stderr, flush=True)
    return found.exit_code()

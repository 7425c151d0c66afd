"""One operator process: its parts, and its states from standby to leader to the end."""

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Awaitable, Callable, Collection

from everstep_operator import handlers, health_seam, server
from everstep_operator.election import Leadership, LeaseLost
from everstep_operator.health.loop import HealthLoop
from everstep_operator.jobs.agents import Agents
from everstep_operator.jobs.passes import Passes
from everstep_operator.kube import Kube
from everstep_operator.listing import resync, resync_forever
from everstep_operator.metrics import Metrics
from everstep_operator.namespaces import NamespaceBack, leave_out_denied, watch_left_out
from everstep_operator.node_leases import NodeLeases
from everstep_operator.scheduler import Scheduler
from everstep_operator.settings import Settings
from everstep_operator.values import EventDraft
from everstep_operator.world import World

STOP_SECONDS = 5.0
"""How long cancelled tasks may take to end."""

RESTORED = "the API server's state is older than it was (etcd restored from a backup?)"

log = logging.getLogger(__name__)


class OlderState(Exception):
    """This process remembers newer state than the API server has."""


class Replica:
    """`nodes` writes nodes; both ports write only while `leadership` lasts."""

    def __init__(self, settings: Settings, port: Kube, nodes: Kube, leadership: Leadership) -> None:
        self._settings, self._port, self._leadership = settings, port, leadership
        port.seconds_left = nodes.seconds_left = leadership.seconds_left
        leads = leadership.leading.is_set
        self._world = World(settings.scope)
        self._leases = NodeLeases(port, self._world, lambda key: self._scheduler.wake(key))
        self._metrics = Metrics(
            (port, nodes), self._world, leads, settings.observe_only,
            lambda: len(self._leases.list_silent()),
        )  # fmt: skip
        self._agents = Agents(
            lambda key: self._scheduler.wake(key), settings.agent_seconds, self._may_speak
        )
        self._passes = passes = Passes(
            port=port,
            world=self._world,
            agents=self._agents,
            key=settings.key_bytes,
            clock=time.time,  # noqa: TID251 the operator's one wall clock
            figures_seconds=settings.figures_seconds,
            figures_qps=settings.qps / 2,
            on_done=self._metrics.count_action,
            wake=lambda key: self._scheduler.wake(key),
            silent_nodes=self._leases.list_silent,
        )
        self._scheduler = Scheduler(passes.run, on_pass=self._metrics.count_pass)
        board = handlers.VerdictBoard(passes, self._scheduler.wake)
        self._health: HealthLoop | health_seam.NoHealth = health_seam.NoHealth(board)
        if settings.health:
            self._health = HealthLoop(
                kube=port, nodes=nodes, world=self._world, settings=settings, verdicts=board
            )
        passes.on_death = self._health.rank_died
        passes.on_failed_starts = self._health.starts_failed
        self._watchers = handlers.Watchers(
            self._world, self._scheduler, self._health.wake, self._health.quarantine_deleted
        )
        self._acting = asyncio.Event()

    async def run(self) -> int:
        """Run until a signal (returns 0) or until one of the parts ends (returns 1)."""
        settings = self._settings
        app = server.build_app(self._world, self._describe_stall, self._render)
        serving = await server.start_server(app, settings.http_host, settings.http_port)
        log.info("probes and metrics on %s", serving.address)
        try:
            left_out = await leave_out_denied(self._port, self._world)
            await resync(self._port, self._world, self._watchers)
            return await self._live(left_out)
        finally:
            await serving.close()

    async def _live(self, left_out: tuple[str, ...]) -> int:
        """At the end the writers stop first, then the lease is released, then the watches stop."""
        ready = asyncio.Event()
        writers = {
            asyncio.create_task(self._when_acting(self._scheduler.run), name="scheduler"),
            asyncio.create_task(self._when_acting(self._health.run), name="health"),
            asyncio.create_task(self._leadership.run(), name="lease"),
        }
        tasks = writers | {
            asyncio.create_task(handlers.run_kopf(self._watchers, ready), name="kopf"),
            asyncio.create_task(_until_signal(ready), name="signal"),
            asyncio.create_task(self._keep_lists(), name="lists"),
            asyncio.create_task(self._until_older(), name="versions"),
        }
        if self._world.scope.nodes:
            tasks.add(asyncio.create_task(self._leases.run(), name="node leases"))
        if left_out:
            watching = watch_left_out(self._port, left_out)
            tasks.add(asyncio.create_task(watching, name="namespaces"))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _cancel(writers)
            await self._tell_restored()
            await self._agents.close()
            await self._leadership.release()
            await _cancel(tasks)
        return _report(next(iter(done)))

    async def _keep_lists(self) -> None:
        """A new leader lists everything before it acts."""
        if not self._leadership.leading.is_set():
            await self._leadership.leading.wait()
            await resync(self._port, self._world, self._watchers)
        self._scheduler.beat = time.monotonic()
        self._acting.set()
        seconds = self._settings.resync_seconds
        await resync_forever(self._port, self._world, self._watchers, seconds)

    async def _until_older(self) -> None:
        await self._port.went_back.wait()
        raise OlderState(f"{RESTORED}: everything is read again")

    async def _tell_restored(self) -> None:
        """Report the older state on as many jobs as time allows: writes end with the lease."""
        if not (self._port.went_back.is_set() and self._leadership.leading.is_set()):
            return
        message = (
            f"{RESTORED}; the operator reads everything again, reuses no attempt, and "
            "the job keeps what it has committed; edits since that backup are lost: check "
            "spec"
        )
        happening = EventDraft(reason="StateRestored", message=message, warning=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_SECONDS):
                await self._passes.tell_all(happening)

    async def _when_acting(self, loop: Callable[[], Awaitable[None]]) -> None:
        await self._acting.wait()
        await loop()

    def _may_speak(self) -> bool:
        return self._leadership.seconds_left() > 0

    def _describe_stall(self) -> str:
        if not self._world.ready:
            return ""
        beats = {"lease": self._leadership.beat}
        if self._acting.is_set():
            beats["scheduler"] = self._scheduler.beat
        return server.describe_stall(beats, time.monotonic())

    def _render(self) -> bytes:
        """A standby reports only itself; the leader also reports nodes and jobs."""
        more = self._health.render_metrics() if self._leadership.leading.is_set() else ""
        return self._metrics.render() + more.encode()


async def _until_signal(ready: asyncio.Event) -> None:
    """Wait for a signal, with our own handlers: with kopf's, kopf would wait 5 s for tasks that it
    takes for its own (kopf 1.45, running.py).
    """
    await ready.wait()
    signalled = asyncio.Event()
    for each in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(each, signalled.set)
    await signalled.wait()


async def _cancel(tasks: Collection[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks, timeout=STOP_SECONDS)


def _report(first: asyncio.Task[None]) -> int:
    """The exit status: 0 after a signal. Any other end is a fault (1): a restart is better than a
    partly working operator.
    """
    error = None if first.cancelled() else first.exception()
    if first.get_name() in ("signal", "kopf") and error is None:
        log.info("stopped")
        return 0
    if isinstance(error, (LeaseLost, OlderState, NamespaceBack)):
        log.error("%s; the process ends", error)
        return 1
    log.error("the %s loop has ended", first.get_name(), exc_info=error)
    return 1

"""everstep-operator: read the settings, connect, start the loops, and end when one of them ends."""

import asyncio
import logging
import sys
import time
from collections.abc import Coroutine
from typing import Any

from everstep_contract import names
from everstep_operator import handlers, kube, server
from everstep_operator.health.loop import HealthLoop
from everstep_operator.jobs.agents import Agents
from everstep_operator.jobs.passes import Passes
from everstep_operator.kube import Kube
from everstep_operator.metrics import Metrics
from everstep_operator.scheduler import Scheduler
from everstep_operator.settings import Settings, SettingsError, load_settings
from everstep_operator.world import Mirror, World

log = logging.getLogger("everstep_operator")
RETRY_SECONDS = 2.0


def main() -> None:
    try:
        settings = load_settings()
    except SettingsError as error:
        sys.exit(f"everstep-operator: {error}")
    logging.basicConfig(
        level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    logging.getLogger("kopf").setLevel(logging.WARNING)
    try:
        sys.exit(asyncio.run(run(settings)))
    except kube.NoCluster as error:
        sys.exit(f"everstep-operator: {error}")


async def run(settings: Settings) -> int:
    port = await Kube.connect(qps=settings.qps, burst=settings.burst)
    try:
        return await _run(settings, port)
    finally:
        await port.close()


async def _run(settings: Settings, port: Kube) -> int:
    world = World()
    metrics = Metrics(port, world)
    agents = Agents(lambda key: scheduler.wake(key), settings.agent_seconds)
    passes = Passes(
        port=port,
        world=world,
        agents=agents,
        key=settings.key_bytes,
        clock=time.time,  # noqa: TID251 the operator's one wall clock
        figures_seconds=settings.figures_seconds,
        on_done=metrics.count_action,
    )
    scheduler = Scheduler(passes.run, on_pass=metrics.count_pass)
    board = handlers.VerdictBoard(passes, scheduler.wake)
    health = HealthLoop(kube=port, world=world, settings=settings, verdicts=board)
    passes.on_death = health.rank_died
    watchers = handlers.Watchers(world, scheduler, health.wake, health.quarantine_deleted)
    app = server.build_app(world, scheduler, metrics, health.render_metrics)
    runner = await server.start_server(app, settings.http_host, settings.http_port)
    log.info("probes and metrics on %s", ", ".join(str(a) for a in runner.addresses))
    try:
        await resync(port, world, watchers)
        return await _until_first_ends(
            kopf=handlers.run_kopf(watchers),
            scheduler=scheduler.run(),
            health=health.run(),
            resync=_resync_forever(port, world, watchers, settings.resync_seconds),
        )
    finally:
        await agents.close()
        await runner.cleanup()


async def _until_first_ends(**loops: Coroutine[Any, Any, None]) -> int:
    """kopf ends on a signal: 0. Any other end is a fault: better a new process than half an operator."""
    tasks = [asyncio.create_task(loop, name=name) for name, loop in loops.items()]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    first = next(iter(done))
    error = None if first.cancelled() else first.exception()
    if first.get_name() == "kopf" and error is None:
        log.info("stopped")
        return 0
    log.error("the %s loop has ended", first.get_name(), exc_info=error)
    return 1


async def resync(port: Kube, world: World, watchers: handlers.Watchers) -> None:
    """Lists every kind once; until that has worked there is no pass."""
    while not world.ready:
        try:
            await _list_all(port, world, watchers)
            world.ready = True
        except kube.KubeError as error:
            log.warning("cannot list yet: %s", error)
            await asyncio.sleep(RETRY_SECONDS)
    watchers.wake_all()


async def _resync_forever(
    port: Kube, world: World, watchers: handlers.Watchers, seconds: float
) -> None:
    while True:
        await asyncio.sleep(seconds)
        try:
            await _list_all(port, world, watchers)
        except kube.KubeError as error:
            log.warning("full lists failed, the watches go on: %s", error)


async def _list_all(port: Kube, world: World, watchers: handlers.Watchers) -> None:
    listed: tuple[tuple[kube.Kind, Mirror, str], ...] = (
        (kube.JOBS, world.jobs, ""),
        (kube.PODS, world.pods, names.LABEL_JOB),
        (kube.NODES, world.nodes, ""),
        (kube.QUARANTINES, world.quarantines, ""),
    )
    for kind, mirror, labels in listed:
        items, version = await port.list(kind, labels=labels)
        lost = mirror.replace(items, version)
        if lost:
            log.warning("%d %s had gone without an event", len(lost), kind.plural)
            watchers.wake_all()


if __name__ == "__main__":
    main()

"""/healthz, /readyz and /metrics on one port."""

import time
from collections.abc import Callable

from aiohttp import web

from everstep_operator.metrics import Metrics
from everstep_operator.scheduler import Scheduler
from everstep_operator.world import World

STALLED_SECONDS = 60.0
"""The scheduler turns at least every 5 s; this much longer means that the loop is stuck."""


def build_app(
    world: World, scheduler: Scheduler, metrics: Metrics, more: Callable[[], str]
) -> web.Application:
    async def healthz(_: web.Request) -> web.Response:
        silent = time.monotonic() - scheduler.beat
        if silent > STALLED_SECONDS:
            return web.Response(
                status=503, text=f"the scheduler has not turned for {silent:.0f} s\n"
            )
        return web.Response(text="ok\n")

    async def readyz(_: web.Request) -> web.Response:
        if not world.ready:
            return web.Response(status=503, text="the first lists are not complete\n")
        return web.Response(text="ok\n")

    async def show_metrics(_: web.Request) -> web.Response:
        body = metrics.render() + more().encode()
        return web.Response(body=body, headers={"Content-Type": "text/plain; version=0.0.4"})

    app = web.Application()
    app.add_routes(
        [
            web.get("/healthz", healthz),
            web.get("/readyz", readyz),
            web.get("/metrics", show_metrics),
        ]
    )
    return app


async def start_server(app: web.Application, host: str, port: int) -> web.AppRunner:
    """Clean the runner up at the end."""
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    return runner

"""/healthz, /readyz and /metrics on one port."""

from collections.abc import Callable, Mapping

from aiohttp import web

from everstep_operator.world import World

STALLED_SECONDS = 60.0
"""Each loop turns every few seconds; this much longer means that it is stuck."""


def describe_stall(beats: Mapping[str, float], now: float) -> str:
    """Which loop has not turned for too long; "" if all do."""
    stuck = [f"{n} ({now - at:.0f} s)" for n, at in beats.items() if now - at > STALLED_SECONDS]
    return f"loops that have not turned: {', '.join(stuck)}" if stuck else ""


def build_app(
    world: World, stall: Callable[[], str], render: Callable[[], bytes]
) -> web.Application:
    async def healthz(_: web.Request) -> web.Response:
        if stalled := stall():
            return web.Response(status=503, text=f"{stalled}\n")
        return web.Response(text="ok\n")

    async def readyz(_: web.Request) -> web.Response:
        if not world.ready:
            return web.Response(status=503, text="the first lists are not complete\n")
        return web.Response(text="ok\n")

    async def show_metrics(_: web.Request) -> web.Response:
        headers = {"Content-Type": "text/plain; version=0.0.4"}
        return web.Response(body=render(), headers=headers)

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

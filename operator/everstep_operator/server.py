"""/healthz, /readyz and /metrics on one port."""

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Mapping

from aiohttp import web

from everstep_contract.http.accepting import BACKLOG, accept_connections
from everstep_operator.world import World

log = logging.getLogger(__name__)

CONNECTIONS = 100
"""Limit of open connections, because anyone may connect. Beyond it the oldest is closed: a probe or a scrape takes
much less time than a hundred others need to connect.
"""
KEEPALIVE_SECONDS = 75.0
"""Limit for the next request on a connection. After it the connection is closed."""
STALLED_SECONDS = 60.0
"""Each loop turns every few seconds; one that has not turned for this long is stuck."""
PAGE_REST = 10
"""For this many times as long as it took to write the page of metrics, the same page is served. So requests, which
anyone may send, take at most a tenth of the event loop. The page of 1,000 jobs takes 0.7 s.
"""


def describe_stall(beats: Mapping[str, float], now: float) -> str:
    """The loops that have not turned for too long; "" if there are none."""
    stuck = [f"{n} ({now - at:.0f} s)" for n, at in beats.items() if now - at > STALLED_SECONDS]
    return f"loops that have not turned: {', '.join(stuck)}" if stuck else ""


class Page:
    """The page of metrics."""

    def __init__(
        self, render: Callable[[], bytes], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._render, self._clock = render, clock
        self._body = b""
        self._until = float("-inf")

    def read(self) -> bytes:
        began = self._clock()
        if began >= self._until:
            self._body = self._render()
            ended = self._clock()
            self._until = ended + PAGE_REST * (ended - began)
        return self._body


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
        return web.Response(body=page.read(), headers=headers)

    page = Page(render)
    app = web.Application()
    app.add_routes(
        [
            web.get("/healthz", healthz),
            web.get("/readyz", readyz),
            web.get("/metrics", show_metrics),
        ]
    )
    return app


class HttpServer:
    """If file descriptors run out, it pauses and logs that once (see `accept_connections`). Clients cannot use them
    up (`CONNECTIONS`).
    """

    def __init__(self, runner: web.AppRunner, listener: socket.socket) -> None:
        self._runner = runner
        self._listener = listener
        accepting = accept_connections(listener, self._take, log.warning)
        self._accepting = asyncio.create_task(accepting, name="http")
        self._opening: set[asyncio.Task[None]] = set()
        self._open: list[asyncio.Transport] = []
        """Oldest first."""
        self.address: tuple[str, int] = listener.getsockname()[:2]

    def _take(self, connection: socket.socket) -> None:
        task = asyncio.create_task(self._serve(connection))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _serve(self, connection: socket.socket) -> None:
        server = self._runner.server
        assert server is not None
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_accepted_socket(server, connection)
        self._open = [*(t for t in self._open if not t.is_closing()), transport]
        for oldest in self._open[:-CONNECTIONS]:
            oldest.abort()

    async def close(self) -> None:
        self._accepting.cancel()
        await asyncio.gather(self._accepting, return_exceptions=True)
        self._listener.close()
        await self._runner.cleanup()


async def start_server(app: web.Application, host: str, port: int) -> HttpServer:
    """`host` "": all addresses. Raises OSError if the address cannot be bound."""
    both = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in host else socket.AF_INET
    listener = socket.create_server(
        (host, port), family=family, backlog=BACKLOG, dualstack_ipv6=both
    )
    listener.setblocking(False)
    runner = web.AppRunner(app, access_log=None, keepalive_timeout=KEEPALIVE_SECONDS)
    await runner.setup()
    return HttpServer(runner, listener)

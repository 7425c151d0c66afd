"""The agent's HTTP server: JSON documents, one nonce per TCP connection, nothing unauthenticated
but health and nonce.
"""

import asyncio
import secrets
import weakref
from collections.abc import Awaitable, Callable

from aiohttp import web

from everstep_contract import auth, codec

BODY_LIMIT = 64 * 1024 * 1024
KEEPALIVE_SECONDS = 75.0
Handler = Callable[[bytes], Awaitable[bytes]]


class Server:
    """`routes` maps a path to a coroutine from body to body. Binds `host` only."""

    def __init__(self, token: str, routes: dict[str, Handler]) -> None:
        self._token = token
        self._routes = routes
        self._verifiers: weakref.WeakKeyDictionary[asyncio.BaseTransport, auth.Verifier] = (
            weakref.WeakKeyDictionary()
        )
        self._runner: web.AppRunner | None = None
        self.port = 0

    async def open(self, host: str, port: int) -> None:
        """Raises OSError if the address cannot be bound; port 0 takes a free one (see `port`)."""
        app = web.Application(client_max_size=BODY_LIMIT)
        app.router.add_get("/healthz", self._health)
        app.router.add_get("/v1/nonce", self._nonce)
        app.router.add_route("*", "/{path:.*}", self._call)
        self._runner = web.AppRunner(
            app, access_log=None, keepalive_timeout=KEEPALIVE_SECONDS, shutdown_timeout=1.0
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port, reuse_address=True).start()
        self.port = self._runner.addresses[0][1]

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"ok": True})

    async def _nonce(self, request: web.Request) -> web.Response:
        return web.json_response({"nonce": self._verifier(request).nonce})

    def _verifier(self, request: web.Request) -> auth.Verifier:
        transport = request.transport
        if transport is None:
            raise web.HTTPBadRequest(text="the connection is gone")
        if transport not in self._verifiers:
            self._verifiers[transport] = auth.Verifier(self._token, secrets.token_hex(16))
        return self._verifiers[transport]

    async def _call(self, request: web.Request) -> web.Response:
        verifier = self._verifier(request)
        body = await request.read()
        if not verifier.accepts(request.headers, request.method, request.path, body):
            return web.json_response(
                {
                    "error": "unauthenticated: sign with the job's token and the nonce of this connection"
                },
                status=401,
                headers={auth.HEADER_NONCE: verifier.nonce},
            )
        handler = self._routes.get(request.path)
        if handler is None or request.method != "POST":
            return web.json_response({"error": f"no {request.method} {request.path}"}, status=404)
        try:
            answer = await handler(body)
        except codec.DecodeError as error:
            return web.json_response({"error": str(error)}, status=400)
        return web.Response(body=answer, content_type="application/json")

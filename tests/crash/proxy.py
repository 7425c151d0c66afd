"""A reverse proxy between one operator and the API server. It sees every call, and a fault may act
on any of them.

The operator is unchanged; only its kubeconfig names the proxy. Faults are asked in the order in
which they were added; the first that refuses a call answers it.
"""

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import aiohttp
from aiohttp import web
from yarl import URL

WRITES = frozenset({"POST", "PUT", "PATCH", "DELETE"})
PASSED_ON = ("Authorization", "Content-Type", "Accept", "User-Agent")
_LIMIT = aiohttp.ClientTimeout(total=None, sock_connect=5)


class HungUp(Exception):
    """The caller's connection breaks without an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    method: str
    path: str
    """Includes the query."""
    query: Mapping[str, str]
    body: bytes
    caller: int = 0
    """Which replica of the operator calls: each one uses its own port of the proxy."""

    @property
    def writes(self) -> bool:
        """Return whether the call is a write. Dry runs count as well, because the operator may die there, too."""
        return self.method in WRITES

    @property
    def watches(self) -> bool:
        return self.query.get("watch", "false").lower() in ("true", "1")

    @property
    def bare(self) -> str:
        return self.path.partition("?")[0]

    @property
    def document(self) -> Any:
        try:
            return json.loads(self.body)
        except ValueError:
            return None

    @property
    def title(self) -> str:
        """For example `POST pods a-0-1`: method, kind and name, with the subresource and a dry
        run's mark.
        """
        parts = self.bare.strip("/").split("/")
        parts = parts[2:] if parts[0] == "api" else parts[3:]
        if len(parts) > 2 and parts[0] == "namespaces":
            parts = parts[2:]
        document = self.document if len(parts) == 1 else None
        name = (document or {}).get("metadata", {}).get("name", "") if document else ""
        dry = " (dry run)" if "dryRun" in self.query else ""
        return f"{self.method} {'/'.join(parts)} {name}".strip() + dry


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


class Fault:
    """A fault that does nothing; subclasses override its methods."""

    async def refuse(self, call: Call) -> Answer | None:
        """Called before the API server gets the call. Returns an answer to send instead, or None;
        may raise `HungUp`.
        """
        return None

    async def answer(self, call: Call, answer: Answer) -> Answer:
        """Return the caller's answer, after the API server has handled the call. Not called for open
        watches.
        """
        return answer

    def lines(self, call: Call, lines: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yield the lines that a watch delivers. Raising `HungUp` ends it in the middle."""
        return lines


class Proxy:
    """Use it with `async with`."""

    def __init__(self, upstream: str, ca: Path, host: str, callers: int = 1) -> None:
        self._upstream, self._ca, self._host = upstream, ca, host
        self._callers = callers
        self.faults: list[Fault] = []
        self.written: list[tuple[float, str]] = []
        """(monotonic time, title) of every write that came, in order."""
        self._streams: list[tuple[str, web.Request]] = []
        self._ports: list[int] = []

    @property
    def urls(self) -> list[str]:
        """One URL for each replica."""
        return [f"http://{self._host}:{port}" for port in self._ports]

    async def __aenter__(self) -> Self:
        context = ssl.create_default_context(cafile=str(self._ca))
        connector = aiohttp.TCPConnector(ssl=context, limit=0)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=_LIMIT, auto_decompress=True
        )
        app = web.Application(client_max_size=1 << 24)
        app.router.add_route("*", "/{tail:.*}", self._pass_on)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        for _ in range(self._callers):
            await web.TCPSite(self._runner, self._host, 0).start()
        self._ports = [address[1] for address in self._runner.addresses]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()
        await self._runner.cleanup()

    @property
    def watching(self) -> set[str]:
        """Kinds with an open watch. A watch whose reader has died does not count."""
        return {
            kind
            for kind, request in self._streams
            if request.transport is not None and not request.transport.is_closing()
        }

    def writes_since(self, moment: float) -> list[str]:
        return [title for at, title in self.written if at >= moment]

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        call = Call(
            method=request.method,
            path=request.path_qs,
            query=dict(request.query),
            body=await request.read(),
            caller=self._caller_of(request),
        )
        if call.writes:
            self.written.append((time.monotonic(), call.title))
        try:
            for fault in tuple(self.faults):
                refusal = await fault.refuse(call)
                if refusal is not None:
                    return _respond(refusal)
            return await self._forward(request, call)
        except (HungUp, aiohttp.ClientError, ConnectionError):
            # Whatever failed, the caller sees its connection break.
            if request.transport is not None:
                request.transport.abort()
            raise asyncio.CancelledError from None

    def _caller_of(self, request: web.Request) -> int:
        assert request.transport is not None
        return self._ports.index(request.transport.get_extra_info("sockname")[1])

    async def _forward(self, request: web.Request, call: Call) -> web.StreamResponse:
        headers = {name: request.headers[name] for name in PASSED_ON if name in request.headers}
        url = URL(self._upstream + call.path, encoded=True)
        async with self._session.request(
            call.method, url, data=call.body or None, headers=headers
        ) as reply:
            if call.watches and reply.status == 200:
                return await self._stream(request, call, reply)
            answer = Answer(
                status=reply.status,
                body=await reply.read(),
                headers={"Content-Type": reply.headers.get("Content-Type", "application/json")},
            )
        for fault in tuple(self.faults):
            answer = await fault.answer(call, answer)
        return _respond(answer)

    async def _stream(
        self, request: web.Request, call: Call, reply: aiohttp.ClientResponse
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        lines = _lines(reply.content)
        for fault in tuple(self.faults):
            lines = fault.lines(call, lines)
        kind = call.bare.rpartition("/")[2]
        stream = (kind, request)
        self._streams.append(stream)
        try:
            async for line in lines:
                await response.write(line)
        finally:
            self._streams.remove(stream)
        return response


def build_status(status: int, reason: str, message: str) -> bytes:
    document = {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "code": status,
        "reason": reason,
        "message": message,
    }
    return json.dumps(document).encode()


def build_refusal(status: int, reason: str, message: str, **headers: str) -> Answer:
    return Answer(
        status=status,
        body=build_status(status, reason, message),
        headers={
            "Content-Type": "application/json",
            **{name.replace("_", "-"): value for name, value in headers.items()},
        },
    )


def _respond(answer: Answer) -> web.Response:
    return web.Response(status=answer.status, body=answer.body, headers=dict(answer.headers))


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Complete lines with their line ends. A watch event may be longer than any reader's limit."""
    rest = b""
    async for chunk in content.iter_any():
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            yield line + b"\n"
    if rest:
        yield rest

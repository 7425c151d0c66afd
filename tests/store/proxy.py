"""An S3 proxy in front of a real server that injects faults on request.

A request is forwarded unchanged, including `Host`, so its signature stays valid. The first armed
fault that matches a request acts on it; without a match the request is only forwarded. Every
request is recorded in `seen`.
"""

import asyncio
import contextlib
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web

BODY_LIMIT = 128 * 2**20
_HOP = ("connection", "keep-alive", "transfer-encoding", "content-length", "content-encoding")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    status: int
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""


Forward = Callable[["Request"], Awaitable[Answer]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    method: str
    target: str
    """Path and query as they were sent."""
    headers: tuple[tuple[str, str], ...]
    body: bytes
    wire: web.Request


Act = Callable[[Request, Forward], Awaitable[Answer | web.StreamResponse]]


@dataclass(slots=True)
class Fault:
    """Applies `act` to requests whose method and target match: to each with probability `chance`, and
    to `times` in all (None: no limit).
    """

    act: Act
    method: str = ".*"
    target: str = ""
    times: int | None = None
    chance: float = 1.0
    hits: int = 0

    def takes(self, request: Request, dice: random.Random) -> bool:
        if self.times is not None and self.hits >= self.times:
            return False
        fits = re.fullmatch(self.method, request.method) and re.search(self.target, request.target)
        if not fits or dice.random() >= self.chance:
            return False
        self.hits += 1
        return True


@dataclass(slots=True)
class S3Proxy:
    upstream: str
    seed: int = 0
    faults: list[Fault] = field(default_factory=list)
    seen: list[tuple[str, str]] = field(default_factory=list)
    endpoint: str = ""
    _dice: random.Random = field(default_factory=random.Random)
    _client: aiohttp.ClientSession | None = None

    def arm(self, act: Act, method: str = ".*", target: str = "", **how: float | int) -> Fault:
        fault = Fault(act, method, target, **how)  # type: ignore[arg-type]
        self.faults.append(fault)
        return fault

    def mend(self) -> None:
        self.faults.clear()

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator["S3Proxy"]:
        self._dice.seed(self.seed)
        app = web.Application(client_max_size=BODY_LIMIT)
        app.router.add_route("*", "/{rest:.*}", self._serve)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as client:
            self._client = client
            await site.start()
            self.endpoint = f"http://127.0.0.1:{runner.addresses[0][1]}"
            try:
                yield self
            finally:
                await runner.cleanup()

    async def _serve(self, wire: web.Request) -> web.StreamResponse:
        request = Request(
            method=wire.method,
            target=wire.raw_path,
            headers=tuple(wire.headers.items()),
            body=await wire.read(),
            wire=wire,
        )
        self.seen.append((request.method, request.target))
        fault = next((f for f in self.faults if f.takes(request, self._dice)), None)
        answer = await (fault.act(request, self.forward) if fault else self.forward(request))
        if isinstance(answer, web.StreamResponse):
            return answer
        with contextlib.suppress(ConnectionError):  # the client may have given up meanwhile
            return await send(request, answer, answer.body)
        return web.Response(status=499)

    async def forward(self, request: Request) -> Answer:
        assert self._client is not None
        kept = [(k, v) for k, v in request.headers if k.lower() not in _HOP]
        url = aiohttp.client.URL(self.upstream + request.target, encoded=True)
        skip = ("Accept-Encoding", "User-Agent", "Content-Type", "Accept")
        async with self._client.request(
            request.method, url, headers=kept, data=request.body or None,
            skip_auto_headers=skip, allow_redirects=False,
        ) as answer:  # fmt: skip
            return Answer(
                status=answer.status,
                headers=tuple(answer.headers.items()),
                body=await answer.read(),
            )


async def send(request: Request, answer: Answer, body: bytes) -> web.StreamResponse:
    """Send `answer`'s head, including the length of its own body, but then only `body`."""
    out = web.StreamResponse(status=answer.status)
    for name, value in answer.headers:
        if name.lower() not in _HOP:
            out.headers.add(name, value)
    length = next((v for k, v in answer.headers if k.lower() == "content-length"), None)
    head = request.method == "HEAD" and length is not None
    out.content_length = int(length or 0) if head else len(answer.body)
    await out.prepare(request.wire)
    if body and not head:
        await out.write(body)
    if len(body) == len(answer.body):
        await out.write_eof()
    return out


# --- faults --------------------------------------------------------------------------------------


def refuse(status: int, code: str, message: str = "as told") -> Act:
    """The store answers with this error and does nothing."""

    async def act(request: Request, forward: Forward) -> Answer:
        return _error(status, code, message)

    return act


def serve_at_most(count: int) -> Act:
    """Answer SlowDown to a request that comes while `count` others are in progress."""
    under_way = 0

    async def act(request: Request, forward: Forward) -> Answer:
        nonlocal under_way
        if under_way >= count:
            return _error(503, "SlowDown", "Please reduce your request rate.")
        under_way += 1
        try:
            return await forward(request)
        finally:
            under_way -= 1

    return act


def lose_answer(status: int = 500, code: str = "InternalError") -> Act:
    """The store carries out the request, but the client gets an error."""

    async def act(request: Request, forward: Forward) -> Answer:
        await forward(request)
        return _error(status, code, "We encountered an internal error. Please try again.")

    return act


def hang(after_head: bool) -> Act:
    """The client gets nothing, or only the head; the connection stays open."""

    async def act(request: Request, forward: Forward) -> web.StreamResponse:
        if after_head:
            await send(request, await forward(request), b"")
        await asyncio.sleep(3600)
        raise AssertionError

    return act


def drop(part: float = 0.0) -> Act:
    """The connection breaks after this fraction of the answer's body."""

    async def act(request: Request, forward: Forward) -> web.StreamResponse:
        answer = await forward(request)
        out = await send(request, answer, answer.body[: int(len(answer.body) * part)])
        assert request.wire.transport is not None
        request.wire.transport.abort()
        return out

    return act


def change(how: Callable[[bytes], bytes]) -> Act:
    """The store's answer, with its body changed by `how`."""

    async def act(request: Request, forward: Forward) -> Answer:
        answer = await forward(request)
        return Answer(status=answer.status, headers=_bare(answer), body=how(answer.body))

    return act


def store_other(how: Callable[[bytes], bytes]) -> Act:
    """`how` changes the body before the store gets it. The writer gets the store's answer."""

    async def act(request: Request, forward: Forward) -> Answer:
        # The headers stay unchanged, so a store that checks a signed payload refuses the body.
        changed = Request(
            method=request.method, target=request.target, headers=request.headers,
            body=how(request.body), wire=request.wire,
        )  # fmt: skip
        return await forward(changed)

    return act


Put = Callable[[str, bytes], Awaitable[None]]


def ignore_condition(put: Put) -> Act:
    """A server that ignores `If-None-Match`, so it has no create-only PUT. The header is signed and
    cannot be removed, so `put` writes the object directly, past the proxy.
    """

    async def act(request: Request, forward: Forward) -> Answer:
        await put(request.target, request.body)
        return Answer(status=200, headers=(("ETag", '"0"'),))

    return act


def look_then_put(put: Put, pause: float = 0.05) -> Act:
    """Create-only PUT as in some gateways (versitygw 1.7): it checks for the object, and writes a
    moment later.
    """
    taken: set[str] = set()

    async def act(request: Request, forward: Forward) -> Answer:
        if request.target in taken:
            return _error(412, "PreconditionFailed", "At least one condition did not hold")
        await asyncio.sleep(pause)
        taken.add(request.target)
        await put(request.target, request.body)
        return Answer(status=200, headers=(("ETag", '"0"'),))

    return act


def _bare(answer: Answer) -> tuple[tuple[str, str], ...]:
    return tuple((k, v) for k, v in answer.headers if not k.lower().startswith("content-length"))


def _error(status: int, code: str, message: str) -> Answer:
    body = (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
    )
    head = (("Content-Type", "application/xml"), ("Content-Length", str(len(body))))
    return Answer(status=status, headers=head, body=body.encode())

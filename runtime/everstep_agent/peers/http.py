"""The agent's HTTP server: its connections and their time limits. `answering` handles one request.

Unauthenticated clients can make it hold at most one head and `UNPROVEN_BYTES` on each of
`UNPROVEN_CONNECTIONS` connections, each for at most `PROVE_SECONDS`.
"""

import asyncio
import resource
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from everstep_agent.peers.answering import Answering, Handler, Response
from everstep_contract import auth
from everstep_contract.http.accepting import BACKLOG, accept_connections
from everstep_contract.http.channel import Channel, Head, Malformed, join_address

__all__ = ["Handler", "Server"]

PROVE_SECONDS = 10.0
"""Limit for a new connection to prove the token. After it the connection is closed."""
UNPROVEN_CONNECTIONS = 1024
"""Limit of connections without proof (or a quarter of the open-files limit, if that is less).
Beyond it the oldest is closed.
"""
KEEPALIVE_SECONDS = 75.0
"""Limit for the next request on a proven connection. After it the connection is closed, and its
client opens another.
"""
BODY_SECONDS = 60.0
"""Limit for a request's body. After it the connection is closed, and its client asks again."""
SEND_SECONDS = 30.0
"""Limit for sending an answer. After it the connection is closed, because its client has gone or is
suspended.
"""
CLOSE_SECONDS = 1.0
"""Limit for pending answers when the agent ends. After it their connections are closed."""


@dataclass(slots=True, eq=False)
class Caller:
    """One connection, and its remaining limits."""

    channel: Channel
    verifier: auth.Verifier
    since: float
    task: asyncio.Task[None] | None = None
    proven: bool = False
    busy: bool = False

    def head_seconds(self) -> float:
        return KEEPALIVE_SECONDS if self.proven else self._seconds_to_prove()

    def body_seconds(self) -> float:
        return BODY_SECONDS if self.proven else self._seconds_to_prove()

    def _seconds_to_prove(self) -> float:
        """Counted from the start of the connection, so a client cannot extend the limit by sending
        a byte now and then.
        """
        return max(0.0, self.since + PROVE_SECONDS - time.monotonic())


class Server:
    """`routes` maps a path to a coroutine from body to body; `say` logs a message."""

    def __init__(
        self, token: str, routes: dict[str, Handler], say: Callable[[str], object] = lambda _: None
    ) -> None:
        self._token = token
        self._answering = Answering(routes, say)
        self._say = say
        self._callers: dict[Caller, None] = {}
        self._unproven: dict[Caller, None] = {}
        """Oldest first."""
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self.port = 0
        self.address = ""

    async def open(self, host: str, port: int) -> None:
        """Start to listen; port 0 takes a free one (see `port`). Raises OSError if `host` cannot be
        bound.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
        listener.setblocking(False)
        self._listener = listener
        self.port = listener.getsockname()[1]
        self.address = join_address(host, self.port)
        self._accepting = asyncio.create_task(accept_connections(listener, self._take, self._say))

    async def close(self) -> None:
        """Give pending answers `CLOSE_SECONDS`, then close every connection."""
        if self._listener is None or self._accepting is None:
            return
        self._accepting.cancel()
        await asyncio.gather(self._accepting, return_exceptions=True)
        self._listener.close()
        if busy := [c.task for c in self._callers if c.busy and c.task]:
            await asyncio.wait(busy, timeout=CLOSE_SECONDS)
        rest = [c.task for c in self._callers if c.task]
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    def _take(self, connection: socket.socket) -> None:
        limit = choose_unproven_limit(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        while len(self._unproven) >= limit:
            oldest = next(iter(self._unproven))
            del self._unproven[oldest]
            if oldest.task is not None:
                oldest.task.cancel()
        caller = Caller(
            channel=Channel(connection),
            verifier=auth.Verifier(self._token, self.address, secrets.token_hex(16)),
            since=time.monotonic(),
        )
        self._callers[caller] = self._unproven[caller] = None
        caller.task = asyncio.create_task(self._serve(caller))

    async def _serve(self, caller: Caller) -> None:
        try:
            while await self._exchange(caller):
                pass
            async with asyncio.timeout(SEND_SECONDS):
                await caller.channel.hang_up()
        except (OSError, Malformed):
            pass  # includes TimeoutError; the caller finds the connection closed and asks again
        finally:
            caller.channel.close()
            self._callers.pop(caller, None)
            self._unproven.pop(caller, None)

    async def _exchange(self, caller: Caller) -> bool:
        """Serve one request. Returns whether to keep the connection.

        Raises OSError, `Malformed`.
        """
        async with asyncio.timeout(caller.head_seconds()):
            head = await caller.channel.read_head()
        if head is None:
            return False
        caller.busy = True
        response = await self._respond(caller, head)
        last = response.last or head.closes
        headers = {"content-type": "application/json", **response.headers}
        if last:
            headers["connection"] = "close"
        first = f"HTTP/1.1 {response.status} -"
        await caller.channel.send(first, headers, response.body, seconds=SEND_SECONDS)
        caller.busy = False
        return not last

    async def _respond(self, caller: Caller, head: Head) -> Response:
        question = self._answering.begin(caller.verifier, head)
        if question.exchange is not None:
            self._believe(caller)
        if head.length > question.limit:
            return self._answering.refuse_unread(caller.verifier, question)
        body = await caller.channel.read_body(head.length, seconds=caller.body_seconds())
        response = await self._answering.answer(caller.verifier, question, body)
        if response.proven:
            self._believe(caller)
        return response

    def _believe(self, caller: Caller) -> None:
        caller.proven = True
        self._unproven.pop(caller, None)


def choose_unproven_limit(open_files: int) -> int:
    """How many connections without proof are allowed, so that enough descriptors remain for the
    agent's own work.
    """
    if open_files == resource.RLIM_INFINITY:
        return UNPROVEN_CONNECTIONS
    return max(8, min(UNPROVEN_CONNECTIONS, open_files // 4))

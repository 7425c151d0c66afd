"""The client: sends requests on one keep-alive connection. Each answer states whether its sender is
authenticated.
"""

import asyncio
import json
import secrets
import socket
import time
from dataclasses import dataclass

from everstep_contract import auth
from everstep_contract.bodies import Body
from everstep_contract.http.channel import (
    BODY_BYTES,
    UNPROVEN_BYTES,
    Channel,
    Head,
    Malformed,
    split_address,
)

CONNECT_SECONDS = 2.0
"""Limit for opening a connection. Then the request fails, and the caller decides when to retry."""
IDLE_SECONDS = 60.0
"""A connection that was unused for longer is reopened: the server closes it after
`KEEPALIVE_SECONDS`, 75.
"""
NONCE_PATH = "/v1/nonce"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    status: int
    body: bytes
    """Empty if the sender is not authenticated and the body exceeds `UNPROVEN_BYTES`."""
    proven: bool
    """Whether its sender has the job's token and answered this very request."""


class Connection:
    """A connection to one address, for one request at a time. Cancelling a request closes it."""

    def __init__(self, address: str, token: str) -> None:
        self.address = address
        self._signer = auth.Signer(token, address)
        self._channel: Channel | None = None
        self._used_at = 0.0

    async def ask(self, method: str, path: str, body: Body, limit: int = BODY_BYTES) -> Answer:
        """Send a request and return the answer. Raises OSError or ValueError (`Malformed`); the
        caller limits the total time.

        Args:
            limit: the most bytes that the body of an authenticated answer may have.
        """
        try:
            channel = await self._open()
            answer = await self._ask(channel, method, path, body, limit)
        except BaseException:
            self.close()
            raise
        self._used_at = time.monotonic()
        return answer

    def close(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    @property
    def is_open(self) -> bool:
        return self._channel is not None

    async def _open(self) -> Channel:
        channel = self._channel
        if channel is not None and (
            time.monotonic() - self._used_at > IDLE_SECONDS or not channel.is_idle()
        ):
            self.close()
            channel = None
        if channel is None:
            channel = self._channel = Channel(await self._dial())
            self._signer.begin(await self._fetch_nonce(channel))
        return channel

    async def _dial(self) -> socket.socket:
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                return await dial(self.address)
        except TimeoutError:
            raise TimeoutError(f"no connection within {CONNECT_SECONDS:g} s") from None

    async def _fetch_nonce(self, channel: Channel) -> str:
        await channel.send(f"GET {NONCE_PATH} HTTP/1.1", {"host": self.address}, b"")
        head = await _read_head(channel)
        if head.status != 200 or head.length > UNPROVEN_BYTES:
            raise Malformed(f"no nonce: status {head.status}, {head.length} bytes")
        try:
            return str(json.loads(await channel.read_body(head.length))["nonce"])
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise Malformed(f"no nonce: {error}") from None

    async def _ask(
        self, channel: Channel, method: str, path: str, body: Body, limit: int
    ) -> Answer:
        exchange, headers = self._signer.sign(method, path, body, secrets.token_hex(16))
        headers |= {"host": self.address, "content-type": "application/json"}
        await channel.send(f"{method} {path} HTTP/1.1", headers, body)
        head = await _read_head(channel)
        digest = self._signer.believe(exchange, head.status, head.headers)
        answer = await _read_answer(channel, head, digest, limit)
        if head.closes or (digest is None and head.length > UNPROVEN_BYTES):
            self.close()
        return answer


async def _read_head(channel: Channel) -> Head:
    head = await channel.read_head()
    if head is None:
        raise ConnectionResetError("the connection was closed before the answer")
    return head


async def _read_answer(channel: Channel, head: Head, digest: str | None, limit: int) -> Answer:
    """Read at most `limit` bytes from an authenticated sender, and at most `UNPROVEN_BYTES` from any
    other.
    """
    if digest is None:
        small = head.length <= UNPROVEN_BYTES
        body = await channel.read_body(head.length) if small else b""
        return Answer(status=head.status, body=body, proven=False)
    if head.length > limit:
        raise Malformed(f"an answer of {head.length} bytes, the limit is {limit}")
    body = await channel.read_body(head.length)
    if auth.digest_of(body) != digest:
        raise Malformed("the answer's body is not the one that was signed")
    return Answer(status=head.status, body=body, proven=True)


async def dial(address: str) -> socket.socket:
    """A connected socket. Raises OSError; ValueError if the address is not host:port."""
    host, port = split_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    connection = socket.socket(family, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, (host, port))
    except BaseException:
        connection.close()
        raise
    return connection

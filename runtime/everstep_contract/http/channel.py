"""One connection: a head, then a body of a stated length, one exchange after the other.

Only what the caller asked for is read: anything more that an unauthenticated peer sends stays in
the kernel's buffers and uses none of this process's memory.
"""

import asyncio
import contextlib
import re
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from everstep_contract.bodies import Body, Part, count_bytes, list_parts

HEAD_BYTES = 8 * 1024
"""Limit of the first line and headers of a request or answer."""
UNPROVEN_BYTES = 8 * 1024
"""Limit of the body from a peer that is not authenticated."""
BODY_BYTES = 64 * 1024 * 1024
"""Limit of the body from an authenticated peer. For scale: 2,000 members take 0.2 MiB in a `seen`,
and 1 TiB of chunks takes 5 MiB in a part.
"""
_END = b"\r\n\r\n"
_AT_ONCE = 256 * 1024
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_LENGTH = re.compile(r"[0-9]{1,12}")


class Malformed(ValueError):
    """The input is not the HTTP that Everstep uses, or exceeds a limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    words: tuple[str, str, str]
    """The first line: method, path, version of a request; version, status, reason of an answer."""
    headers: Mapping[str, str]
    """By name in lower case."""

    @property
    def length(self) -> int:
        """Bytes of the body. Raises `Malformed`."""
        if "transfer-encoding" in self.headers:
            raise Malformed("a body without Content-Length; send its length")
        stated = self.headers.get("content-length", "0")
        if not _LENGTH.fullmatch(stated):
            raise Malformed(f"Content-Length is {stated!r:.40}")
        return int(stated)

    @property
    def status(self) -> int:
        """The status of an answer. Raises `Malformed`."""
        if not re.fullmatch(r"[1-5][0-9][0-9]", self.words[1]):
            raise Malformed(f"no HTTP status: {self.words[1]!r:.40}")
        return int(self.words[1])

    @property
    def closes(self) -> bool:
        """Whether the sender closes the connection after this exchange."""
        said = self.headers.get("connection", "").lower()
        old = "HTTP/1.0" in (self.words[0], self.words[2])
        return said == "close" or (old and said != "keep-alive")


class Channel:
    """Methods raise OSError if the connection breaks, or `Malformed`. The caller limits the time, or
    gives the `seconds` for which to wait for the peer (then they raise TimeoutError).
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._rest = bytearray()
        """Received with a head and not read yet; less than `HEAD_BYTES`."""

    async def read_head(self) -> Head | None:
        """None: the peer has closed the connection between two exchanges."""
        while (end := self._rest.find(_END)) < 0:
            if len(self._rest) >= HEAD_BYTES:
                raise Malformed(f"a head of more than {HEAD_BYTES} bytes")
            more = await self._receive(HEAD_BYTES - len(self._rest))
            if not more and not self._rest:
                return None
            if not more:
                raise ConnectionResetError("the connection was closed within a head")
            self._rest += more
        raw = bytes(self._rest[:end])
        del self._rest[: end + len(_END)]
        return parse_head(raw)

    async def read_body(self, length: int, *, seconds: float | None = None) -> bytes:
        body = self._rest[:length]
        del self._rest[:length]
        if len(body) < length:  # a small body has usually arrived with its head
            async with asyncio.timeout(seconds):
                await self._read_more(body, length)
        return bytes(body)

    async def _read_more(self, body: bytearray, length: int) -> None:
        while len(body) < length:
            more = await self._receive(min(length - len(body), _AT_ONCE))
            if not more:
                raise ConnectionResetError("the connection was closed within a body")
            body += more

    async def send(
        self,
        first: str,
        headers: Mapping[str, str],
        body: Body,
        *,
        seconds: float | None = None,
    ) -> None:
        lines = [first, *(f"{name}: {value}" for name, value in headers.items())]
        lines.append(f"content-length: {count_bytes(body)}")
        head = "\r\n".join(lines).encode("latin-1") + _END
        parts = [head, *list_parts(body)]
        sent = 0
        with contextlib.suppress(BlockingIOError):
            sent = self._socket.sendmsg(parts)
        if sent < len(head) + count_bytes(body):
            async with asyncio.timeout(seconds):
                await self._send_rest(parts, sent)

    async def _send_rest(self, parts: Iterable[Part], sent: int) -> None:
        loop = asyncio.get_running_loop()
        for part in parts:
            if sent < len(part):
                await loop.sock_sendall(self._socket, memoryview(part)[sent:])
            sent = max(0, sent - len(part))

    def is_idle(self) -> bool:
        """Whether the connection is still open, as far as known, and has no unexpected input."""
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return not self._rest
        except OSError:
            return False
        return False

    async def hang_up(self) -> None:
        """Close the connection so that the bytes sent last can still arrive: unread input would
        reset the connection, so it is read first.
        """
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            for _ in range(UNPROVEN_BYTES // 1024):
                if not await self._receive(1024):
                    break
        self.close()

    def close(self) -> None:
        self._socket.close()

    async def _receive(self, limit: int) -> bytes:
        return await asyncio.get_running_loop().sock_recv(self._socket, limit)


def parse_head(raw: bytes) -> Head:
    """Raises `Malformed`."""
    first, *lines = raw.decode("latin-1").split("\r\n")
    words = first.split(" ", 2)
    if len(words) == 2:
        words.append("")  # an answer without a reason
    if len(words) != 3 or "HTTP/1." not in (words[0][:7], words[2][:7]):
        raise Malformed(f"not HTTP/1.1: {first!r:.80}")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not _NAME.fullmatch(name) or name.lower() in headers:
            raise Malformed(f"a malformed or repeated header: {line!r:.80}")
        headers[name.lower()] = value.strip()
    return Head(words=(words[0], words[1], words[2]), headers=headers)


def join_address(host: str, port: int) -> str:
    """host:port, with the brackets that an IPv6 address needs."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Raises ValueError."""
    host, _, text = address.rpartition(":")
    port = int(text)
    if not 0 < port < 2**16:
        raise ValueError(f"{address!r:.80}: {port} is no port")
    return host.removeprefix("[").removesuffix("]"), port

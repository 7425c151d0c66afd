"""A server at a peer's address that lacks the job's token.

It answers as it likes, or relays to a real agent.
"""

import asyncio
import contextlib
from types import TracebackType

from everstep_contract import auth


class Stranger:
    """Gives a nonce to anyone, and answers every other request with `body` and `headers`.

    With `token`, the token of its own job, it proves that it has that token.
    """

    def __init__(
        self,
        body: bytes = b"{}",
        headers: dict[str, str] | None = None,
        *,
        token: str = "",
        relay_to: str = "",
        endless_head: bool = False,
    ) -> None:
        self._body = body
        self._headers = headers or {}
        self._token = token
        self._relay_to = relay_to
        self._endless_head = endless_head
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.address = ""
        self.asked: list[str] = []
        """The first lines of the requests."""
        self.relayed: list[str] = []
        """The status of a real agent's answer to each relayed request, except for nonces."""
        self.cut_off = asyncio.Event()
        """Set when a client hangs up."""

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self._server = await asyncio.start_server(self._connected, host, port)
        bound = self._server.sockets[0].getsockname()
        self.address = f"{bound[0]}:{bound[1]}"

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def __aenter__(self) -> "Stranger":
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        work = self._relay(reader, writer) if self._relay_to else self._answer(reader, writer)
        task = asyncio.get_running_loop().create_task(self._until_over(work, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _until_over(self, work: object, writer: asyncio.StreamWriter) -> None:
        try:
            await work  # type: ignore[misc]
        except (ConnectionError, asyncio.IncompleteReadError):
            self.cut_off.set()
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            first, length, head = await _read_head(reader)
            await reader.readexactly(length)
            self.asked.append(first)
            while self._endless_head:
                writer.write(b"HTTP/1.1 200 OK\r\n" + b"x-more: yes\r\n" * 1000)
                await writer.drain()
            body, headers = self._body, self._headers
            if "/v1/nonce" in first:
                body, headers = b'{"nonce": "00ff"}', {}
            elif self._token:
                headers = headers | self._prove(first, head)
            lines = [f"{k}: {v}" for k, v in {"content-length": len(body), **headers}.items()]
            writer.write("\r\n".join(["HTTP/1.1 200 OK", *lines, "", ""]).encode() + body)
            await writer.drain()

    def _prove(self, first: str, head: bytes) -> dict[str, str]:
        lines = (x.partition(": ") for x in head.decode("latin-1").split("\r\n"))
        asked = {name.lower(): value for name, _, value in lines}
        exchange = auth.Exchange(
            server=asked["host"],
            nonce=asked[auth.NONCE],
            counter=int(asked[auth.COUNTER]),
            challenge=asked[auth.CHALLENGE],
            method=first.split(" ")[0],
            path=first.split(" ")[1],
        )
        digest = auth.digest_of(self._body)
        proof = exchange.prove_answer(self._token, 200, digest)
        return {auth.DIGEST: digest, auth.PROOF: proof}

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self._relay_to.rpartition(":")
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        try:
            while True:
                first, length, head = await _read_head(reader)
                far_writer.write(head + await reader.readexactly(length))
                answer, length, head = await _read_head(far_reader)
                if "/v1/nonce" not in first:
                    self.relayed.append(answer.split(" ")[1])
                writer.write(head + await far_reader.readexactly(length))
                await writer.drain()
        finally:
            far_writer.close()


async def _read_head(reader: asyncio.StreamReader) -> tuple[str, int, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    stated = [x.partition(":")[2] for x in lines if x.lower().startswith("content-length:")]
    return lines[0], int(stated[0]) if stated else 0, head


async def exchange(address: str, raw: bytes) -> bytes:
    """Send these bytes; return all that arrives until the connection is closed."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(raw)
    try:
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

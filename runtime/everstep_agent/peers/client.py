"""The agent's HTTP client. An answer that does not prove its sender is ignored: a dead pod's
address may belong to another pod by now.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Any, TypeVar

from everstep_contract import codec
from everstep_contract.http.asking import Answer, Connection

UNUSED_SECONDS = 75.0
"""How long an unused connection is kept."""
T = TypeVar("T")


class PeerError(Exception):
    """The peer gave no valid answer.

    `refused`: a peer of this job has refused the request. `stranger`: the process at that address
    does not have the job's token. Neither: the peer cannot be reached.
    """

    def __init__(self, message: str, *, refused: bool = False, stranger: bool = False) -> None:
        super().__init__(message)
        self.refused = refused
        self.stranger = stranger


class PeerClient:
    """Requests on one kept-alive connection, one after the other."""

    def __init__(self, address: str, token: str) -> None:
        self.address = address
        self._connection = Connection(address, token)
        self._turn = asyncio.Lock()

    async def __aenter__(self) -> "PeerClient":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def is_open(self) -> bool:
        return self._connection.is_open

    async def close(self) -> None:
        self._connection.close()

    async def call(
        self, path: str, body: Any, answer: type[T] | codec.Reader[T], *, timeout: float
    ) -> T:
        """The decoded answer. Raises `PeerError` after `timeout` seconds at the latest, also for an
        answer that cannot be decoded.
        """
        raw = await self.fetch(path, body, timeout=timeout)
        try:
            if isinstance(answer, codec.Reader):
                return answer.read(raw)
            return codec.loads(answer, raw)
        except codec.DecodeError as error:
            raise PeerError(f"{self.address}{path}: {error}", refused=True) from None

    async def fetch(self, path: str, body: Any, *, timeout: float) -> bytes:
        """The body of the answer. Raises `PeerError` after `timeout` seconds at the latest.

        Args:
            body: a document; or bytes or a tuple of parts, which are sent as they are.
        """
        raw = body if isinstance(body, (bytes, tuple)) else codec.dumps(body)
        where = f"{self.address}{path}"
        try:
            async with asyncio.timeout(timeout), self._turn:
                found = await self._connection.ask("POST", path, raw)
        except (OSError, ValueError) as error:
            what = str(error) or f"no answer within {timeout:g} s"
            raise PeerError(f"{where}: {what}") from None
        return _judge(where, found)


def _judge(where: str, found: Answer) -> bytes:
    """The body of a valid answer. Raises `PeerError`."""
    if not found.proven:
        raise PeerError(
            f"{where}: the answer (status {found.status}) does not prove the job's token "
            "and is ignored, as if the peer had not answered: another pod may have this "
            "address by now, or an older Everstep runs there.",
            stranger=True,
        )
    if found.status != 200:
        text = found.body[:300].decode(errors="replace")
        raise PeerError(f"{where}: {found.status} {text}", refused=True)
    return found.body


class Pool:
    """Clients for many addresses, for calls that may be held and must not wait for each other."""

    def __init__(self, token: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._token, self._clock = token, clock
        self._idle: dict[str, list[tuple[float, PeerClient]]] = {}
        """Address → since when each unused connection to it is unused, the longest first."""
        self._closed = False

    async def call(
        self, address: str, path: str, body: Any, answer: type[T], *, timeout: float
    ) -> T:
        async with self._borrow(address) as client:
            return await client.call(path, body, answer, timeout=timeout)

    async def fetch(self, address: str, path: str, body: Any, *, timeout: float) -> bytes:
        async with self._borrow(address) as client:
            return await client.fetch(path, body, timeout=timeout)

    @contextlib.asynccontextmanager
    async def _borrow(self, address: str) -> AsyncIterator[PeerClient]:
        await self._close_unused(self._clock() - UNUSED_SECONDS)
        idle = self._idle.get(address)
        client = idle.pop()[1] if idle else PeerClient(address, self._token)
        try:
            yield client
        except BaseException:
            await client.close()
            raise
        finally:
            if self._closed:
                await client.close()
            elif client.is_open:
                self._idle.setdefault(address, []).append((self._clock(), client))

    async def close(self) -> None:
        self._closed = True
        await self._close_unused(math.inf)

    async def _close_unused(self, since: float) -> None:
        """Close the connections that have not been used since then: their pods may be gone."""
        for address, idle in list(self._idle.items()):
            old = [client for at, client in idle if at <= since]
            if len(old) == len(idle):
                del self._idle[address]
            else:
                del idle[: len(old)]
            for client in old:
                await client.close()

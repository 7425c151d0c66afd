"""The agent's client: one connection per peer and purpose, because its nonce and counter belong to
the connection.
"""

import asyncio
import contextlib
from types import TracebackType
from typing import Any, TypeVar

import aiohttp

from everstep_contract import auth, codec

T = TypeVar("T")
CONNECT_SECONDS = 2.0


class PeerError(Exception):
    """The peer could not be asked; `refused` if it said so itself, else it is merely unreachable."""

    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


class PeerClient:
    """Requests on one kept-alive connection, one after the other."""

    def __init__(self, address: str, token: str) -> None:
        self.address = address
        self._signer = auth.Signer(token)
        self._session: aiohttp.ClientSession | None = None
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

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def call(self, path: str, body: Any, answer: type[T], *, timeout: float) -> T:
        """Raises `PeerError`; an answer that does not decode counts as one, too."""
        raw = codec.dumps(body)
        async with self._turn:
            try:
                async with asyncio.timeout(timeout):
                    text = await self._post(path, raw)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                await self.close()
                what = str(error) or type(error).__name__
                raise PeerError(f"{self.address}{path}: {what}") from None
        try:
            return codec.loads(answer, text)
        except codec.DecodeError as error:
            raise PeerError(f"{self.address}{path}: {error}", refused=True) from None

    async def _post(self, path: str, raw: bytes) -> bytes:
        for _ in range(3):
            headers = self._signer.headers("POST", path, raw)
            session = self._open()
            async with session.post(
                f"http://{self.address}{path}", data=raw, headers=headers
            ) as response:
                text = await response.read()
                if response.status == 200:
                    return text
                if response.status != 401:
                    raise PeerError(
                        f"{self.address}{path}: {response.status} {text[:300].decode(errors='replace')}",
                        refused=True,
                    )
                self._signer.renew(response.headers.get(auth.HEADER_NONCE, ""))
        raise PeerError(f"{self.address}{path}: refuses our token", refused=True)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=1, keepalive_timeout=60),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
                auto_decompress=False,
            )
        return self._session


class Pool:
    """Clients to one address for calls that may be held and must not wait for each other."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._idle: dict[str, list[PeerClient]] = {}
        self._closed = False

    async def call(
        self, address: str, path: str, body: Any, answer: type[T], *, timeout: float
    ) -> T:
        idle = self._idle.setdefault(address, [])
        client = idle.pop() if idle else PeerClient(address, self._token)
        try:
            return await client.call(path, body, answer, timeout=timeout)
        except BaseException:
            await client.close()
            raise
        finally:
            if self._closed:
                await client.close()
            elif client._session is not None:
                idle.append(client)

    async def close(self) -> None:
        self._closed = True
        for idle in self._idle.values():
            for client in idle:
                with contextlib.suppress(aiohttp.ClientError):
                    await client.close()
        self._idle.clear()

"""Routes the agents' connections through proxies, one per pair, that a test can cut and mend.

On a cut link packets vanish: open connections fall silent, and new ones get no answer.
"""

import asyncio
import contextlib
import contextvars
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from agent.gang import Gang
from everstep_agent.agent import Agent
from everstep_contract.http import asking

DIALER: contextvars.ContextVar[list[str]] = contextvars.ContextVar("dialer")
"""Address of the agent whose task is running, once it is known."""


class Network:
    def __init__(self) -> None:
        self.halves: tuple[frozenset[str], ...] = ()
        self.pair: frozenset[str] = frozenset()
        self._mended = asyncio.Event()
        self._mended.set()
        self._listeners: dict[tuple[str, str], int] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    def cut(self, *halves: set[str]) -> None:
        """Partition the network: addresses of one half reach only each other."""
        self.halves = tuple(frozenset(h) for h in halves)
        self._mended.clear()

    def cut_link(self, one: str, other: str) -> None:
        """Cut the link between two addresses, which both still reach all others."""
        self.pair = frozenset((one, other))
        self._mended.clear()

    def mend(self) -> None:
        self.halves, self.pair = (), frozenset()
        self._mended.set()

    def is_up(self, one: str, other: str) -> bool:
        if {one, other} == self.pair:
            return False
        return all((one in half) == (other in half) for half in self.halves)

    def through(self, dialer: str, address: str) -> str:
        """Return where `dialer` must connect to reach `address` over this network."""
        pair = (dialer, address)
        if pair not in self._listeners:
            listener = socket.create_server(("127.0.0.1", 0))
            listener.setblocking(False)
            self._listeners[pair] = listener.getsockname()[1]
            self._keep(self._serve(listener, pair))
        return f"127.0.0.1:{self._listeners[pair]}"

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _keep(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, listener: socket.socket, pair: tuple[str, str]) -> None:
        loop = asyncio.get_running_loop()
        with listener:
            while True:
                connection, _ = await loop.sock_accept(listener)
                self._keep(self._carry(connection, pair))

    async def _carry(self, connection: socket.socket, pair: tuple[str, str]) -> None:
        near_in, near_out = await asyncio.open_connection(sock=connection)
        host, _, port = pair[1].rpartition(":")
        writers = [near_out]
        try:
            await self._until_up(pair)
            far_in, far_out = await asyncio.open_connection(host, int(port))
            writers.append(far_out)
            await asyncio.gather(
                self._copy(near_in, far_out, pair), self._copy(far_in, near_out, pair)
            )
        except OSError:
            pass
        finally:
            for writer in writers:
                writer.close()

    async def _copy(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, pair: tuple[str, str]
    ) -> None:
        while chunk := await source.read(65536):
            await self._until_up(pair)
            sink.write(chunk)
            await sink.drain()
        with contextlib.suppress(OSError):
            sink.write_eof()

    async def _until_up(self, pair: tuple[str, str]) -> None:
        while not self.is_up(*pair):
            await self._mended.wait()
            await asyncio.sleep(0)


@contextlib.contextmanager
def routed(network: Network, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In this context, agents connect through `network`; the operator still connects directly."""
    plain = asking.dial

    async def dial(address: str) -> socket.socket:
        dialer = DIALER.get([])
        return await plain(network.through(dialer[0], address) if dialer else address)

    with monkeypatch.context() as patched:
        patched.setattr(asking, "dial", dial)
        yield


class SplitGang(Gang):
    """A gang whose agents connect through a `Network`."""

    async def start(self, slot: int, attempt: int, **changes: object) -> Agent:
        box: list[str] = []
        token = DIALER.set(box)
        try:
            agent = await super().start(slot, attempt, **changes)
        finally:
            DIALER.reset(token)
        box.append(agent.me.address)
        return agent

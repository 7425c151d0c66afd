"""The network of the storm's pods: a namespace for each node, links that a fault cuts, and a gate in
front of the store. It is inside the storm's own namespace (`unshare`), so it needs no privilege and
touches no other network.
"""

import asyncio
import contextlib
import subprocess
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

HOME = "10.72.0.254"
"""Address of the operator and of the gate to the store, for every node."""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


class Ground:
    def __init__(self) -> None:
        self._holders: list[subprocess.Popen[bytes]] = []
        ip("link", "set", "lo", "up")
        ip("addr", "add", f"{HOME}/32", "dev", "lo")
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")

    def add_node(self) -> tuple[str, list[str]]:
        """Add a node; return its address and the prefix for commands that run there."""
        number = len(self._holders) + 1
        holder = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
        self._holders.append(holder)
        _until_apart(holder.pid)
        address, link = f"10.72.0.{number}", f"node{number}"
        ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", str(holder.pid))
        ip("addr", "add", f"{HOME}/32", "dev", link)
        ip("link", "set", link, "up")
        ip("route", "add", f"{address}/32", "dev", link)
        inside = ["nsenter", "--net", f"--target={holder.pid}", "--"]
        for words in (
            "link set lo up",
            f"addr add {address}/32 dev eth0",
            "link set eth0 up",
            f"route add {HOME}/32 dev eth0",
            f"route add default via {HOME} dev eth0",
        ):
            subprocess.run([*inside, "ip", *words.split()], check=True, timeout=20)
        return address, inside

    def cut(self, one: Iterable[str], other: Iterable[str]) -> None:
        """Drop the packets between the two sets of addresses; both still reach the store and the
        operator.
        """
        self._rules("add", one, other)

    def mend(self, one: Iterable[str], other: Iterable[str]) -> None:
        self._rules("del", one, other)

    def _rules(self, verb: str, one: Iterable[str], other: Iterable[str]) -> None:
        others = list(other)
        for a in one:
            for b in others:
                ip("rule", verb, "pref", "100", "from", a, "to", b, "blackhole")
                ip("rule", verb, "pref", "100", "from", b, "to", a, "blackhole")

    def close(self) -> None:
        for holder in self._holders:
            holder.kill()
            holder.wait()


def _until_apart(pid: int) -> None:
    """Wait until `unshare` has created the namespace."""
    ours = Path("/proc/self/ns/net").readlink()
    end = time.monotonic() + 20
    while Path(f"/proc/{pid}/ns/net").readlink() == ours:
        assert time.monotonic() < end, "unshare has created no network namespace"
        time.sleep(0.005)


class Gate:
    """A TCP proxy in front of the store: open, silent (nothing passes, connections stay) or shut
    (connections are reset).
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._passes = asyncio.Event()
        self._passes.set()
        self._shut = False
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> str:
        self._server = await asyncio.start_server(self._accept, HOME, 0)
        return f"http://{HOME}:{self._server.sockets[0].getsockname()[1]}"

    @contextlib.asynccontextmanager
    async def silent(self) -> AsyncIterator[None]:
        self._passes.clear()
        try:
            yield
        finally:
            self._passes.set()

    @contextlib.asynccontextmanager
    async def shut(self) -> AsyncIterator[None]:
        self._shut = True
        for writer in list(self._writers):
            writer.transport.abort()
        try:
            yield
        finally:
            self._shut = False

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._carry(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._shut:
            writer.transport.abort()
            return
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, far_writer}
        try:
            await asyncio.gather(self._copy(reader, far_writer), self._copy(far_reader, writer))
        except OSError:
            pass
        finally:
            for each in (writer, far_writer):
                self._writers.discard(each)
                each.close()

    async def _copy(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while chunk := await source.read(1 << 16):
            await self._passes.wait()
            sink.write(chunk)
            await sink.drain()
        with contextlib.suppress(OSError):
            sink.write_eof()

"""The unix socket between an agent and its workers: frames of `everstep_contract.wire`, told apart
by the worker's pid.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from everstep_agent import logline
from everstep_contract import codec, wire

SOCKET = "agent.sock"
PATH_LIMIT = 100
"""A unix socket's path holds 108 bytes."""


class Peer(Protocol):
    pid: int
    writer: asyncio.StreamWriter | None


P = TypeVar("P", bound=Peer)


class Link(Generic[P]):
    """`find` gives the worker of a pid; `on_frame` gets every frame after Hello, in order. The socket
    lies in `folder`; `path` is where workers find it.
    """

    def __init__(
        self,
        folder: str,
        *,
        find: Callable[[int], P | None],
        on_frame: Callable[[P, wire.Envelope], None],
        log: logline.Log,
    ) -> None:
        self.path = ""
        self._folder = folder
        self._descriptor = -1
        self._find = find
        self._on_frame = on_frame
        self._log = log
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def open(self) -> None:
        # Open until we close: the path may lead through it.
        self._descriptor = os.open(self._folder, os.O_PATH | os.O_DIRECTORY)
        self.path = choose_socket_path(self._folder, pid=os.getpid(), descriptor=self._descriptor)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        self._server = await asyncio.start_unix_server(self._serve, self.path)
        os.chmod(self.path, 0o600)

    async def close(self) -> None:
        if self._server is None:
            return
        self._server.close()
        self._server = None
        for writer in list(self._writers):
            writer.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        os.close(self._descriptor)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            await self._frames(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the worker's end shows through its exit status, not here
        except codec.DecodeError as error:
            self._log.say("worker_frame_refused", message=str(error))
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _frames(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = await read_frame(reader)
        if not isinstance(hello.frame, wire.Hello):
            raise codec.DecodeError(f"expected Hello first, found {type(hello.frame).__name__}")
        worker = self._find(hello.frame.pid)
        if worker is None:
            raise codec.DecodeError(f"Hello from pid {hello.frame.pid}, which is no worker of ours")
        worker.writer = writer
        self._on_frame(worker, hello)
        while True:
            self._on_frame(worker, await read_frame(reader))


async def read_frame(reader: asyncio.StreamReader) -> wire.Envelope:
    (length,) = wire.LENGTH.unpack(await reader.readexactly(wire.LENGTH.size))
    if length > wire.LIMIT_BYTES:
        raise codec.DecodeError(f"a frame of {length} bytes, the limit is {wire.LIMIT_BYTES}")
    return wire.decode(await reader.readexactly(length))


def choose_socket_path(folder: str, *, pid: int, descriptor: int) -> str:
    """The socket's path; where that would be too long, the same place through a descriptor that `pid`
    holds of the folder, so that nothing lies outside of it.
    """
    path = os.path.join(folder, SOCKET)
    if len(os.fsencode(path)) <= PATH_LIMIT:
        return path
    return f"/proc/{pid}/fd/{descriptor}/{SOCKET}"

"""The unix socket between an agent and its workers: frames of `everstep_contract.wire`; workers are
identified by pid.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from everstep_agent import logline
from everstep_contract import codec, wire
from everstep_contract.http.accepting import BACKLOG, accept_connections

SOCKET = "agent.sock"
PATH_LIMIT = 100
"""The path of a unix socket is limited to 108 bytes."""


class Peer(Protocol):
    pid: int
    writer: asyncio.StreamWriter | None


P = TypeVar("P", bound=Peer)


class Link(Generic[P]):
    """`find` returns the worker of a pid; `on_frame` receives every frame after Hello, in order.
    `on_end` is called after the last one, once the worker has ended. `on_error` receives an exception
    that one of them raises, a bug in Everstep. The socket is in `folder`; workers connect to `path`.
    """

    def __init__(
        self,
        folder: str,
        *,
        find: Callable[[int], P | None],
        on_frame: Callable[[P, wire.Envelope], None],
        log: logline.Log,
        on_end: Callable[[P], None] = lambda worker: None,
        on_error: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self.path = ""
        self._folder = folder
        self._descriptor = -1
        self._find = find
        self._on_frame, self._on_end, self._on_error = on_frame, on_end, on_error
        self._log = log
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._serving: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        # Open until we close: the path may lead through this descriptor.
        self._descriptor = os.open(self._folder, os.O_PATH | os.O_DIRECTORY)
        self.path = choose_socket_path(self._folder, pid=os.getpid(), descriptor=self._descriptor)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        listener = self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.setblocking(False)
        listener.bind(self.path)
        os.chmod(self.path, 0o600)
        listener.listen(BACKLOG)
        self._accepting = asyncio.create_task(accept_connections(listener, self._take, self._say))

    async def close(self) -> None:
        if self._listener is None or self._accepting is None:
            return
        self._accepting.cancel()
        for task in list(self._serving):
            task.cancel()
        await asyncio.gather(self._accepting, *self._serving, return_exceptions=True)
        self._listener.close()
        self._listener = None
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        os.close(self._descriptor)

    def _say(self, message: str) -> None:
        self._log.say("worker_socket", message=message)

    def _take(self, connection: socket.socket) -> None:
        task = asyncio.create_task(self._serve(connection))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, connection: socket.socket) -> None:
        reader, writer = await asyncio.open_unix_connection(sock=connection)
        try:
            await self._frames(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # a worker's end is detected by its exit status, not here
        except codec.DecodeError as error:
            self._log.say("worker_frame_refused", message=str(error))
        except Exception as error:
            self._on_error(error)
        finally:
            writer.close()

    async def _frames(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = await read_frame(reader)
        if not isinstance(hello.frame, wire.Hello):
            raise codec.DecodeError(f"expected Hello first, found {type(hello.frame).__name__}")
        worker = self._find(hello.frame.pid)
        if worker is None:
            raise codec.DecodeError(
                f"process {hello.frame.pid} has called everstep.run and is no worker, so it ends: the script has "
                "started it. Give everstep run the script that trains, not one that starts it (as torchrun does)"
            )
        worker.writer = writer
        self._on_frame(worker, hello)
        try:
            while True:
                self._on_frame(worker, await read_frame(reader))
        except (asyncio.IncompleteReadError, ConnectionError):
            self._on_end(worker)


async def read_frame(reader: asyncio.StreamReader) -> wire.Envelope:
    (length,) = wire.LENGTH.unpack(await reader.readexactly(wire.LENGTH.size))
    if length > wire.LIMIT_BYTES:
        raise codec.DecodeError(f"a frame of {length} bytes, the limit is {wire.LIMIT_BYTES}")
    return wire.decode(await reader.readexactly(length))


def choose_socket_path(folder: str, *, pid: int, descriptor: int) -> str:
    """The socket's path. If it is too long: the same socket through a descriptor of the folder that
    `pid` holds open, so that nothing is created outside the folder.
    """
    path = os.path.join(folder, SOCKET)
    if len(os.fsencode(path)) <= PATH_LIMIT:
        return path
    return f"/proc/{pid}/fd/{descriptor}/{SOCKET}"

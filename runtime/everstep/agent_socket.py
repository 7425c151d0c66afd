"""The worker's socket to its agent: one thread reads, and any thread may write. A reply is
matched to its request by number.
"""

import faulthandler
import itertools
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NoReturn

from everstep.errors import StateError
from everstep_contract import wire

EXIT_AGENT_LOST = 1
SOON_SECONDS = 1.0
"""If steps are shorter than this, their reports are sent together at this interval: each send wakes
the agent, on a core that a rank may need. The agent reads the position itself from the shared page.
"""


class AgentSocket:
    """Frames to and from the agent.

    Args:
        on_epoch: called in the reader's thread with each frame that ends or changes the epoch.
    """

    def __init__(self, connection: socket.socket, on_epoch: Callable[[Any], None]) -> None:
        self._connection = connection
        self._on_epoch = on_epoch
        self._sending = threading.Lock()
        self._unsent: list[Any] = []
        """Frames that `send_soon` holds back."""
        self._sent_soon_at = -SOON_SECONDS
        self._numbers = itertools.count(1)
        self._open: dict[int, Future[Any]] = {}
        self._starts: queue.SimpleQueue[wire.Start] = queue.SimpleQueue()
        self._saves: queue.SimpleQueue[wire.Save] = queue.SimpleQueue()
        self._news = threading.Condition()
        self._finishing = self._released = False
        self.cut = threading.Event()
        """Set once the epoch is over for this worker; never cleared."""
        threading.Thread(target=self._read, name="everstep-link", daemon=True).start()

    def send(self, frame: Any) -> None:
        """Raises `StateError` for a frame that the agent would refuse: it would close the connection."""
        raw = wire.encode(frame)
        if len(raw) > wire.LIMIT_BYTES:
            raise StateError(
                f"the state without its tensors takes {len(raw) / 2**20:.0f} MiB as text, and the limit is "
                f"{wire.LIMIT_BYTES >> 20} MiB: keep long lists in state_dict() as tensors or arrays"
            )
        self._write(raw)

    def send_soon(self, frame: Any) -> None:
        """Send a frame at once if this method last sent one `SOON_SECONDS` ago or earlier.
        Otherwise hold it back until the next frame is sent; it is lost if this process is killed
        before that.
        """
        with self._sending:
            self._unsent.append(frame)
        now = time.monotonic()
        if now - self._sent_soon_at >= SOON_SECONDS:
            self._sent_soon_at = now
            self._write(b"")

    def request(self, frame: Any) -> Any:
        """Send a request and wait for the reply. The agent limits the wait: it ends a worker that hangs."""
        number, answer = next(self._numbers), Future[Any]()
        self._open[number] = answer
        self._write(wire.encode(frame, number))
        return answer.result()

    def wait_start(self) -> wire.Start:
        return self._starts.get()

    def wait_save(self) -> wire.Save:
        """Wait for the next `Save`; an `Exit` ends the process meanwhile."""
        return self._saves.get()

    def wait_release(self) -> bool:
        """Wait after `Finished`. True: the agent has sent `Exit`. False: the epoch ended first."""
        with self._news:
            self._finishing = True
            self._news.wait_for(lambda: self._released or self.cut.is_set())
            self._finishing = self._released
            return self._released

    def leave(self, status: int) -> NoReturn:
        """Flush the output and end the process at once: no destructor of a broken group runs."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    def _write(self, raw: bytes) -> None:
        try:
            with self._sending:
                unsent, self._unsent = self._unsent, []
                self._connection.sendall(b"".join((*map(wire.encode, unsent), raw)))
        except OSError:
            self.leave(EXIT_AGENT_LOST)

    def _read(self) -> None:
        while (body := self._frame()) is not None:
            envelope = wire.decode(body)
            match envelope.frame:
                case wire.Start() as start:
                    self._starts.put(start)
                case wire.Cut(keep=False):
                    self._ended()
                    self._on_epoch(envelope.frame)
                case (
                    wire.Cut()
                    | wire.Regroup()
                    | wire.GiveVector()
                    | wire.GiveState()
                    | wire.TakeState()
                    | wire.SaveHeld()
                ):
                    self._on_epoch(envelope.frame)
                case wire.Save() as save:
                    self._saves.put(save)
                case wire.ShowStack():
                    faulthandler.dump_traceback(file=2, all_threads=True)
                case wire.Exit():
                    self._release()
                case reply if envelope.id in self._open:
                    self._open.pop(envelope.id).set_result(reply)
        self.leave(EXIT_AGENT_LOST)

    def _ended(self) -> None:
        with self._news:
            self.cut.set()
            self._news.notify_all()

    def _release(self) -> None:
        with self._news:
            self._released = True
            self._news.notify_all()
            waited_for = self._finishing
        if not waited_for:
            self.leave(0)

    def _frame(self) -> bytes | None:
        head = self._exactly(wire.LENGTH.size)
        if head is None:
            return None
        (length,) = wire.LENGTH.unpack(head)
        return self._exactly(length) if length <= wire.LIMIT_BYTES else None

    def _exactly(self, count: int) -> bytes | None:
        parts = bytearray()
        while len(parts) < count:
            try:
                more = self._connection.recv(count - len(parts))
            except OSError:
                return None
            if not more:
                return None
            parts += more
        return bytes(parts)


def connect(path: str, on_epoch: Callable[[Any], None]) -> AgentSocket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(None)  # the script may have set a default, and agents may be silent
    connection.connect(path)
    return AgentSocket(connection, on_epoch)

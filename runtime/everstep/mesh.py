"""Connections between all pairs of ranks of an epoch, for a few kilobytes that all need at the same moment.

gloo first asks the receiver whether it is ready, and passes the data from thread to thread. Here a
rank writes, and the next thing that runs is the main thread of the others.
"""

import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence

LARGEST = 2**16
"""Bytes of a message. Sockets can hold this much, so no rank has to wait until another one reads."""
RANKS = 16
"""With more ranks there are no such connections."""
_SECRET = 16
_HELLO = struct.Struct(f"={_SECRET}sI")
"""The listener's secret, which only the job's agents and ranks know; the caller's rank."""
_LENGTH = struct.Struct("=I")
_AT_ONCE = socket.MSG_DONTWAIT
CONNECT_SECONDS = 8.0
"""Limit for all ranks to connect, once each of them listens: only a rank that is lost in between misses
it. It is short, because the next formation waits for the end of this one.
"""
STRANGERS = 64
"""How many connections may be open whose callers have not identified themselves. Beyond that, the oldest is closed: a
rank identifies itself at once.
"""
LOOK_MS = 100
"""How often a rank that waits calls its `look`."""
Look = Callable[[], None]
"""Called again and again while a rank waits. What it raises ends the wait."""
Check = Callable[[int, bytes], None]
"""Called with a rank and its message. What it raises ends the wait."""


class Mesh:
    """Connections to all other ranks; they close with the last reference.

    Args:
        peers: sockets by rank.
    """

    def __init__(self, peers: Mapping[int, socket.socket]) -> None:
        self._peers = dict(peers)
        for peer in self._peers.values():
            peer.settimeout(None)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def sockets(self) -> Sequence[socket.socket]:
        return list(self._peers.values())

    def send(self, body: bytes) -> None:
        """Send to all ranks. If a connection is lost, all are cut."""
        message = _LENGTH.pack(len(body)) + body
        try:
            for peer in self._peers.values():
                peer.sendall(message)
        except OSError:
            self.cut()

    def receive(
        self, look: Look = lambda: None, check: Check = lambda rank, body: None
    ) -> dict[int, bytes] | None:
        """Return the next message of each other rank. Blocks until all are there, and calls `look`
        meanwhile. None: a rank is gone, or this one was cut off; all connections are cut then.

        Args:
            check: called with each message when it is there, while others may be on their way.
        """
        try:
            return self._read_all(look, check)
        except OSError:
            self.cut()
            return None

    def _read_all(self, look: Look, check: Check) -> dict[int, bytes]:
        """Read in the order of arrival: the end of any connection must be noticed at once."""
        waiting = select.poll()
        ranks = {}
        for rank, peer in self._peers.items():
            ranks[peer.fileno()] = rank
            waiting.register(peer, select.POLLIN)
        messages = {rank: _Message(peer) for rank, peer in self._peers.items()}
        found: dict[int, bytes] = {}
        while len(found) < len(self._peers):
            ready = waiting.poll(LOOK_MS)
            if not ready:
                look()
            for number, _ in ready:
                rank = ranks[number]
                if messages[rank].read_some():
                    found[rank] = messages[rank].body
                    check(rank, found[rank])
                    waiting.unregister(number)
        return found

    def cut(self) -> None:
        """Make every call fail from now on, also those that block. From any thread; may be repeated."""
        for peer in self._peers.values():
            try:
                peer.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue


class Listener:
    """This rank's side of the connections, before they are made.

    Args:
        address: IP address on which the other ranks reach this one.
    """

    def __init__(self, address: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.socket = socket.create_server((address, 0), family=family, backlog=RANKS)
        self._secret = secrets.token_bytes(_SECRET)
        host, port = self.socket.getsockname()[:2]
        self.entry = f"{self._secret.hex()} {port} {host}"
        """What the others need to connect."""

    def connect(
        self, rank: int, entries: Sequence[str], seconds: float, look: Look = lambda: None
    ) -> Mesh:
        """Connect to the ranks below this one, and accept connections from those above.

        Args:
            entries: the `entry` of each rank.

        Raises:
            OSError: a rank could not be reached, or did not connect, within `seconds`.
        """
        until = time.monotonic() + seconds
        with self.socket:
            peers = {lower: _call(entries[lower], rank, until) for lower in range(rank)}
            peers |= self._answer(set(range(rank + 1, len(entries))), until, look)
        return Mesh(peers)

    def close(self) -> None:
        self.socket.close()

    def _answer(self, expected: set[int], until: float, look: Look) -> dict[int, socket.socket]:
        """Wait for these ranks to call. Whoever else calls, and says nothing, keeps none of them waiting."""
        self.socket.setblocking(False)
        waiting = select.poll()
        waiting.register(self.socket, select.POLLIN)
        callers: dict[int, _Caller] = {}
        peers: dict[int, socket.socket] = {}
        try:
            while peers.keys() != expected:
                left = until - time.monotonic()
                if left <= 0:
                    raise TimeoutError("timed out")
                ready = waiting.poll(min(left * 1000, LOOK_MS))
                if not ready:
                    look()
                for number, _ in ready:
                    if number == self.socket.fileno():
                        self._take(callers, waiting)
                    elif (caller := callers.get(number)) and caller.read_some():
                        del callers[number]
                        waiting.unregister(number)
                        if caller.knows(self._secret) and caller.rank in expected - peers.keys():
                            peers[caller.rank] = caller.peer
                        else:
                            caller.peer.close()
        finally:
            for caller in callers.values():
                caller.peer.close()
        return peers

    def _take(self, callers: dict[int, "_Caller"], waiting: select.poll) -> None:
        try:
            peer, _ = self.socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # the caller was gone before it was accepted
        callers[peer.fileno()] = _Caller(peer)
        waiting.register(peer, select.POLLIN)
        if len(callers) > STRANGERS:
            oldest = next(iter(callers))
            waiting.unregister(oldest)
            callers.pop(oldest).peer.close()


def listen(world: int, address: str | None) -> Listener | None:
    """Listen for the other ranks. None: there are too many ranks, or this one knows no address of its own.

    Raises:
        RuntimeError: it is not an address of this pod.
    """
    try:
        return Listener(address) if address and world <= RANKS else None
    except OSError as error:
        raise RuntimeError(f"this rank cannot listen at {address}: {error}") from error


def connect(
    rank: int, entries: Sequence[str], listener: Listener | None, look: Look = lambda: None
) -> Mesh | None:
    """Connect to all other ranks. None: a rank does not listen. Raises `RuntimeError`.

    Args:
        entries: the `entry` of each rank; empty: it does not listen.
    """
    if listener is None or not all(entries):
        return None
    try:
        return listener.connect(rank, entries, CONNECT_SECONDS, look)
    except OSError as error:
        raise RuntimeError(f"the ranks could not connect to each other: {error}") from error


def _call(entry: str, rank: int, until: float) -> socket.socket:
    secret, port, host = entry.split()
    peer = socket.create_connection((host, int(port)), max(0.001, until - time.monotonic()))
    peer.sendall(_HELLO.pack(bytes.fromhex(secret), rank))
    return peer


class _Caller:
    """Whoever has connected: its first bytes may not be there yet."""

    def __init__(self, peer: socket.socket) -> None:
        self.peer = peer
        self.rank: int | None = None
        self._hello = bytearray()
        self._secret = b""

    def read_some(self) -> bool:
        """Read what has arrived. Return whether that was the last: all is there, or the caller is gone."""
        try:
            self._hello += _receive(self.peer, _HELLO.size - len(self._hello), _AT_ONCE)
        except BlockingIOError:
            return False
        except OSError:
            return True
        if len(self._hello) < _HELLO.size:
            return False
        self._secret, self.rank = _HELLO.unpack(self._hello)
        return True

    def knows(self, secret: bytes) -> bool:
        return secrets.compare_digest(self._secret, secret)


class _Message:
    """A message that may arrive in parts. No byte after it is read."""

    def __init__(self, peer: socket.socket) -> None:
        self._peer = peer
        self._head = bytearray()
        self._length: int | None = None
        self._body = bytearray()

    def read_some(self) -> bool:
        """Read what has arrived, without waiting for more. Return whether the message is complete."""
        try:
            if self._length is None:
                self._head += _receive(self._peer, _LENGTH.size - len(self._head), _AT_ONCE)
                if len(self._head) < _LENGTH.size:
                    return False
                self._length = min(_LENGTH.unpack(self._head)[0], LARGEST)
            if len(self._body) < self._length:
                self._body += _receive(self._peer, self._length - len(self._body), _AT_ONCE)
        except BlockingIOError:
            return False
        return len(self._body) == self._length

    @property
    def body(self) -> bytes:
        return bytes(self._body)


def _receive(peer: socket.socket, most: int, flags: int) -> bytes:
    found = peer.recv(most, flags)
    if not found:
        raise ConnectionResetError("the other rank has closed its connection")
    return found

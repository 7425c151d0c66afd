"""Output that never blocks its writer.

A pipe or terminal that nobody reads (a stuck log driver, `less`, Ctrl-S) blocks `write`. An agent that is blocked
there reports nothing, commits nothing, and counts as lost. So a separate thread writes. Its queue keeps the
first and the last lines: how the run started and how it ended. The lines between are dropped and counted; the
count is written in their place once the output is read again. Lines that cannot be written, because the disk is
full, are counted in the same way.
"""

import contextlib
import io
import os
import select
import sys
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

HEAD_BYTES = 1 << 20
"""Limit of unwritten output before lines are dropped."""
TAIL_BYTES = 1 << 16
"""Limit of the newest lines, which are kept once the head is full."""
DRAIN_SECONDS = 2.0
"""How long an agent that ends waits for its last lines to be read, before it drops them. It is less
than the part of the grace period that is reserved for the shutdown.
"""
CHUNK_BYTES = 1 << 16


class LineWriter(io.TextIOBase):
    """A text stream for `fd`. `write` never blocks; the text of one call is kept or dropped as a
    unit. Thread-safe.
    """

    def __init__(self, fd: int) -> None:
        self.dropped = 0
        """Lines dropped since the start."""
        self._fd = fd
        self._partial = ""
        self._head: deque[bytes] = deque()
        self._head_bytes = 0
        """Bytes in the head, or being written."""
        self._tail: deque[bytes] = deque()
        """Written once the head is empty."""
        self._tail_bytes = 0
        self._missing = 0
        """Lines dropped between head and tail."""
        self._unwritten = 0
        """Lines that could not be written since the last one that was."""
        self._ends = False
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name=f"output-{fd}", daemon=True).start()

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        with self._changed:
            *lines, self._partial = (self._partial + text).split("\n")
            if lines:
                self._take("".join(f"{line}\n" for line in lines))
        return len(text)

    def flush(self) -> None:
        """Pass on what was written, including an incomplete line, without waiting."""
        with self._changed:
            rest, self._partial = self._partial, ""
            if rest:
                self._take(rest)

    def finish(self, seconds: float) -> None:
        """Wait until everything is written, at most `seconds`."""
        self.flush()
        with self._changed:
            self._ends = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._head_bytes and not self._tail, seconds)

    def _take(self, text: str) -> None:
        data = text.encode(errors="replace")
        fits = not self._head_bytes or self._head_bytes + len(data) <= HEAD_BYTES
        if fits and not self._tail:
            self._put(data)
            return
        self._tail.append(data)
        self._tail_bytes += len(data)
        while self._tail_bytes > TAIL_BYTES and len(self._tail) > 1:
            self._drop(self._tail.popleft())

    def _put(self, data: bytes) -> None:
        self._head.append(data)
        self._head_bytes += len(data)
        self._changed.notify_all()

    def _drop(self, data: bytes) -> None:
        lines = _count_lines(data)
        self._tail_bytes -= len(data)
        self._missing += lines
        self.dropped += lines

    def _run(self) -> None:
        while data := self._next():
            try:
                if self._unwritten:
                    self._write_all(describe_unwritten(self._unwritten).encode())
                    self._unwritten = 0
                self._write_all(data)
            except OSError:  # the disk is full, or the reader is gone for good
                self._unwritten += _count_lines(data)
            with self._changed:
                self._head_bytes -= len(data)
                self._changed.notify_all()

    def _next(self) -> bytes:
        """The next bytes to write; empty: the end of the output."""
        with self._changed:
            self._changed.wait_for(lambda: self._head or self._tail or self._ends)
            if not self._head:
                self._take_tail()
            return self._head.popleft() if self._head else b""

    def _take_tail(self) -> None:
        if self._missing:
            self._put(describe_gap(self._missing).encode())
        for data in self._tail:
            self._put(data)
        self._tail.clear()
        self._tail_bytes = self._missing = 0

    def _write_all(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._fd, view[:CHUNK_BYTES]) :]
            except BlockingIOError:  # another process has made this terminal non-blocking
                select.select((), (self._fd,), ())


def describe_gap(lines: int) -> str:
    return f"everstep: dropped {lines:,} lines: nobody read this output\n"


def describe_unwritten(lines: int) -> str:
    return f"everstep: lost {lines:,} lines: this output could not be written, as on a full disk\n"


def _count_lines(data: bytes) -> int:
    return max(1, data.count(b"\n"))


@dataclass(frozen=True, slots=True)
class Output:
    writers: tuple[LineWriter, ...]

    @property
    def dropped(self) -> int:
        """Lines dropped because nobody reads them."""
        return sum(w.dropped for w in self.writers)


@contextlib.contextmanager
def unblocked(drain: float = DRAIN_SECONDS) -> Iterator[Output]:
    """Make sys.stdout and sys.stderr non-blocking for this process. At the end, wait at most
    `drain` seconds for unwritten output.
    """
    former = sys.stdout, sys.stderr
    writers: dict[object, LineWriter] = {}
    streams = []
    for stream in former:
        stream.flush()
        key = _identity(stream.fileno())  # one writer per pipe, so lines keep their order
        if key not in writers:
            writers[key] = LineWriter(stream.fileno())
        streams.append(writers[key])
    sys.stdout, sys.stderr = streams
    try:
        yield Output(tuple(writers.values()))
    finally:
        sys.stdout, sys.stderr = former
        for writer in writers.values():
            writer.finish(drain)


def _identity(fd: int) -> object:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino

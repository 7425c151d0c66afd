"""A worker's output, line by line, with the prefix `[epoch/rank] `."""

import asyncio
import collections
import math
import os
import select
import sys
import time
from collections.abc import Callable

TAIL_LINES = 60
CHUNK = 65536
PROGRESS_SECONDS = 1.0
"""How often the state of a line is shown that a script overwrites, such as a progress bar. Such a line may have no
end before the job has.
"""


class Tail:
    """The last lines of a worker's stderr, for the exit report of a script that ends early."""

    def __init__(self) -> None:
        self._lines: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)

    def add(self, line: str) -> None:
        self._lines.append(line)

    def text(self) -> str:
        return "\n".join(self._lines)


async def copy_lines(fd: int, *, error: bool, prefix: Callable[[], str], tail: Tail | None) -> None:
    """Runs until the pipe closes."""
    await read_lines(fd, lambda lines: _print(lines, error, prefix(), tail))


async def read_lines(fd: int, take: Callable[[list[str]], None]) -> None:
    """Calls `take` with all lines of each chunk, until the pipe closes."""
    reader = asyncio.StreamReader()
    pipe = os.fdopen(fd, "rb", 0)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    try:
        lines = Lines()
        while chunk := await reader.read(CHUNK):
            take(lines.take(chunk))
        take(lines.finish())
    finally:
        transport.close()


def is_unread(fd: int) -> bool:
    """Whether this pipe holds output that nobody has read. False: it is empty or closed."""
    look = select.poll()
    look.register(fd, select.POLLIN)
    return any(event & select.POLLIN for _, event in look.poll(0))


class Lines:
    """Divides output into lines as a terminal shows them: what follows a carriage return overwrites the line. A line
    longer than 64 KiB is split.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rest = b""
        self._shown_at = -math.inf

    def take(self, chunk: bytes) -> list[str]:
        """The lines that end in this chunk; from time to time also the last state of one that is being overwritten."""
        *lines, rest = (self._rest + chunk).split(b"\n")
        found = [_decode(line) for line in lines]
        overwritten, mark, _ = rest.rstrip(b"\r").rpartition(b"\r")
        if mark:
            rest = rest[len(overwritten) + 1 :]
            state, now = _decode(overwritten), self._clock()
            if state.strip() and now - self._shown_at >= PROGRESS_SECONDS:
                self._shown_at = now
                found.append(state)
        if len(rest) > CHUNK:
            found, rest = [*found, _decode(rest)], b""
        self._rest = rest
        return found

    def finish(self) -> list[str]:
        rest, self._rest = self._rest, b""
        return [_decode(rest)] if rest else []


def _decode(line: bytes) -> str:
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")


def _print(texts: list[str], error: bool, prefix: str, tail: Tail | None) -> None:
    if not texts:
        return
    for text in texts:
        if tail is not None:
            tail.add(text)
    stream = sys.stderr if error else sys.stdout
    stream.write("".join(f"{prefix}{text}\n" for text in texts))
    stream.flush()

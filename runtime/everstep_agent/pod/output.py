"""A worker's output, line by line, with the prefix `[epoch/rank] `."""

import asyncio
import collections
import os
import sys
from collections.abc import Callable

TAIL_LINES = 60
CHUNK = 65536


class Tail:
    """The last lines of a worker's stderr, for the exit report of a script that ends early."""

    def __init__(self) -> None:
        self._lines: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)

    def add(self, line: str) -> None:
        self._lines.append(line)

    def text(self) -> str:
        return "\n".join(self._lines)


async def copy_lines(fd: int, *, error: bool, prefix: Callable[[], str], tail: Tail | None) -> None:
    """Runs until the pipe closes. A line longer than 64 KiB is split."""
    await read_lines(fd, lambda lines: _print(lines, error, prefix(), tail))


async def read_lines(fd: int, take: Callable[[list[str]], None]) -> None:
    """Calls `take` with all complete lines of each chunk, until the pipe closes."""
    reader = asyncio.StreamReader()
    pipe = os.fdopen(fd, "rb", 0)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    try:
        rest = b""
        while chunk := await reader.read(CHUNK):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > CHUNK:
                lines, rest = [*lines, rest], b""
            take(_decode(lines))
        take(_decode([rest] if rest else []))
    finally:
        transport.close()


def _decode(lines: list[bytes]) -> list[str]:
    return [line.decode(errors="replace").rstrip("\r") for line in lines]


def _print(texts: list[str], error: bool, prefix: str, tail: Tail | None) -> None:
    if not texts:
        return
    for text in texts:
        if tail is not None:
            tail.add(text)
    stream = sys.stderr if error else sys.stdout
    stream.write("".join(f"{prefix}{text}\n" for text in texts))
    stream.flush()

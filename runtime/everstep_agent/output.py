"""A worker's output, line by line, behind the prefix `[epoch/rank] `."""

import asyncio
import collections
import os
import sys
from collections.abc import Callable

TAIL_LINES = 60
CHUNK = 65536


class Tail:
    """The last lines of a worker's stderr: what an exit report can show of a script that died
    early.
    """

    def __init__(self) -> None:
        self._lines: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)

    def add(self, line: str) -> None:
        self._lines.append(line)

    def text(self) -> str:
        return "\n".join(self._lines)


async def copy_lines(fd: int, *, error: bool, prefix: Callable[[], str], tail: Tail | None) -> None:
    """Until the pipe closes. A line longer than 64 KiB is passed on in parts."""
    reader = asyncio.StreamReader()
    pipe = os.fdopen(fd, "rb", 0)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    try:
        await _copy(reader, error, prefix, tail)
    finally:
        transport.close()


async def _copy(
    reader: asyncio.StreamReader, error: bool, prefix: Callable[[], str], tail: Tail | None
) -> None:
    rest = b""
    while chunk := await reader.read(CHUNK):
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > CHUNK:
            lines, rest = [*lines, rest], b""
        _print(lines, error, prefix(), tail)
    if rest:
        _print([rest], error, prefix(), tail)


def _print(lines: list[bytes], error: bool, prefix: str, tail: Tail | None) -> None:
    if not lines:
        return
    texts = [line.decode(errors="replace").rstrip("\r") for line in lines]
    for text in texts:
        if tail is not None:
            tail.add(text)
    stream = sys.stderr if error else sys.stdout
    stream.write("".join(f"{prefix}{text}\n" for text in texts))
    stream.flush()

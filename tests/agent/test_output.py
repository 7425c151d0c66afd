"""A worker's output, divided into lines."""

import asyncio
import os

import pytest

from everstep_agent.pod import output


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


async def test_a_progress_bar_is_shown_while_its_line_has_no_end() -> None:
    reader, writer = os.pipe()
    shown: asyncio.Queue[str] = asyncio.Queue()

    def take(lines: list[str]) -> None:
        for line in lines:
            shown.put_nowait(line)

    reading = asyncio.create_task(output.read_lines(reader, take))
    try:
        os.write(writer, b"\r 10% done")
        os.write(writer, b"\r 20% done")
        async with asyncio.timeout(10):
            assert await shown.get() == " 10% done"
    finally:
        os.close(writer)
        await reading
    assert shown.get_nowait() == " 20% done"


def test_of_a_line_that_is_overwritten_one_state_a_second_and_the_last_are_shown() -> None:
    clock = Clock()
    lines = output.Lines(clock)
    found = []
    for percent in range(101):
        clock.now = percent / 8
        found += lines.take(b"\r %d%%" % percent)
    found += lines.take(b"\nafter it\n")
    assert found == [*(f" {p}%" for p in range(0, 100, 8)), " 100%", "after it"]
    assert lines.finish() == []


@pytest.mark.parametrize(
    ("chunks", "found"),
    [
        ((b"one\r\ntwo\r", b"\nthree"), ["one", "two", "three"]),
        ((b"bar\r     \r", b"text\n"), ["bar", "text"]),
        ((b"5%\r", b"6%\r", b"7%\r"), ["5%", "7%"]),
        ((b"\n\n",), ["", ""]),
        ((b"x" * output.CHUNK, b"yz\n"), ["x" * output.CHUNK + "yz"]),
        ((b"x" * output.CHUNK + b"y", b"z"), ["x" * output.CHUNK + "y", "z"]),
    ],
)
def test_lines_are_divided_as_a_terminal_shows_them(chunks: list[bytes], found: list[str]) -> None:
    lines = output.Lines(Clock())
    assert [line for chunk in chunks for line in lines.take(chunk)] + lines.finish() == found

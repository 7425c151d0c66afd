"""The line writer on a real pipe that is read, not read, and read again."""

import errno
import os
import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from everstep_agent import line_writer
from everstep_agent.line_writer import HEAD_BYTES, TAIL_BYTES, LineWriter

LINE = "x" * 99


@dataclass
class Pipe:
    reader: int
    writer: LineWriter

    def read_until(self, end: str) -> str:
        """Read until `end` has arrived. Only the test's own time limit interrupts this."""
        text = ""
        while end not in text:
            text += os.read(self.reader, 1 << 16).decode()
        return text


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    reader, end = os.pipe()
    found = Pipe(reader, LineWriter(end))
    yield found
    os.close(reader)
    found.writer.finish(30.0)  # no thread may still write when the descriptor is reused
    os.close(end)


pytestmark = pytest.mark.timeout(60)


def test_what_is_read_comes_in_order_and_whole(pipe: Pipe) -> None:
    for number in range(2000):
        print(number, LINE, file=pipe.writer, flush=True)
    text = pipe.read_until("1999 " + LINE + "\n")
    assert [int(line.split()[0]) for line in text.splitlines()] == list(range(2000))
    assert pipe.writer.dropped == 0


def test_a_rest_of_a_line_is_written_when_it_is_flushed(pipe: Pipe) -> None:
    pipe.writer.write("50 %")
    pipe.writer.flush()
    assert pipe.read_until("%") == "50 %"


def test_lines_that_a_full_disk_refuses_are_counted_in_their_place(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused, write, full = threading.Semaphore(0), os.write, True

    def refuse(fd: int, data: bytes) -> int:
        if not full or fd != pipe.writer.fileno():
            return write(fd, data)
        refused.release()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", refuse)
    for text in ("one\ntwo\n", "three\n"):
        pipe.writer.write(text)
        assert refused.acquire(timeout=30)
    full = False
    pipe.writer.write("four\n")
    lost = "everstep: lost 3 lines: this output could not be written, as on a full disk\n"
    assert pipe.read_until("four\n") == f"{lost}four\n"


def test_a_line_that_is_longer_than_the_limit_is_kept_whole(pipe: Pipe) -> None:
    pipe.writer.write("y" * (HEAD_BYTES + 1) + "\nend\n")
    assert len(pipe.read_until("end\n")) == HEAD_BYTES + 6


def test_of_what_nobody_reads_the_first_and_the_last_lines_are_kept_and_the_gap_is_counted(
    pipe: Pipe,
) -> None:
    lines = 3 * HEAD_BYTES // 100
    for number in range(lines):
        print(f"{number:>99}", file=pipe.writer)
    assert pipe.writer.dropped > lines // 2
    text = pipe.read_until(f"{lines - 1:>99}\n")
    before, told, after = re.split(r"everstep: dropped ([\d,]+) lines: nobody read .*\n", text)
    first, last = [list(map(int, part.split())) for part in (before, after)]
    dropped = int(told.replace(",", ""))
    assert dropped == pipe.writer.dropped == lines - len(first) - len(last)
    assert first + last == [*range(len(first)), *range(lines - len(last), lines)]
    assert len(last) == TAIL_BYTES // 100
    print("after", file=pipe.writer)
    assert pipe.read_until("after\n") == "after\n"


def test_the_end_does_not_wait_for_a_reader_that_never_comes(pipe: Pipe) -> None:
    for _ in range(3 * HEAD_BYTES // 100):
        print(LINE, file=pipe.writer)
    pipe.writer.finish(0.1)


def test_the_end_waits_for_a_reader_that_is_slow(pipe: Pipe) -> None:
    print(LINE, file=pipe.writer)
    pipe.writer.finish(30.0)
    assert pipe.read_until("\n") == LINE + "\n"


def test_a_reader_that_is_gone_raises_nothing() -> None:
    reader, end = os.pipe()
    os.close(reader)
    writer = LineWriter(end)
    print("to nobody", file=writer, flush=True)
    writer.finish(30.0)
    os.close(end)


def test_a_terminal_that_somebody_made_non_blocking_loses_nothing(pipe: Pipe) -> None:
    os.set_blocking(pipe.writer.fileno(), False)
    for number in range(5000):
        print(f"{number:>99}", file=pipe.writer)
    text = pipe.read_until(f"{4999:>99}\n")
    assert text.count("\n") == 5000


def test_two_streams_of_one_pipe_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, end = os.pipe()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, os.fdopen(os.dup(end), "w"))
    with line_writer.unblocked() as output:
        for number in range(100):
            print(number, file=(sys.stdout, sys.stderr)[number % 2])
    assert os.read(reader, 1 << 16).decode().split() == [str(n) for n in range(100)]
    assert len(output.writers) == 1
    assert output.dropped == 0
    for descriptor in (reader, end):
        os.close(descriptor)

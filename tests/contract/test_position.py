import itertools
import multiprocessing
import os
import signal
import struct
import threading
import time
from pathlib import Path
from typing import Any, cast

import pytest

from everstep_contract.position import (
    SECONDS,
    SIZE,
    Phase,
    Position,
    PositionPage,
    Stretch,
    Where,
    wait_owner_ended,
)

ONE = Position(
    epoch=3,
    applied=41,
    reduction=1,
    phase=Phase.REDUCED,
    scope=Where.STEP,
    waiting=True,
    limit_ms=500,
    since=12.5,
    seconds={name: float(i) for i, name in enumerate(SECONDS)},
)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "position")


def test_a_process_that_was_forked_from_the_worker_leaves_the_page_as_it_is(path: str) -> None:
    worker = PositionPage(path, create=True)
    worker.write(ONE)
    child = PositionPage(path)
    child.detach()
    child.write(Position(epoch=9))
    child.mark(7.0, Stretch.COMPUTE, 1.0)
    assert worker.read() == ONE
    assert worker.read_mark().at == 0


def test_a_new_page_is_a_worker_that_starts(path: str) -> None:
    page = PositionPage(path, create=True)
    read = page.read()
    assert (read.epoch, read.applied, read.phase, read.scope) == (
        0,
        0,
        Phase.COMPUTING,
        Where.STARTUP,
    )
    assert page.armed == 0
    assert Path(path).stat().st_size == SIZE


def test_both_sides_see_the_same_page(path: str) -> None:
    agent, worker = PositionPage(path, create=True), PositionPage(path)
    worker.write(ONE)
    assert agent.read() == ONE
    agent.armed = 42
    assert worker.armed == 42
    assert agent.read() == ONE


def _write_on(path: str) -> None:
    page = PositionPage(path)
    for applied in itertools.count(1):
        page.write(Position(epoch=1, applied=applied, since=float(applied)))


def _is_whole(read: Position) -> bool:
    return read.since == read.applied


def test_a_position_is_whole_wherever_its_writer_is_held_up_or_killed(path: str) -> None:
    agent = PositionPage(path, create=True)
    for _ in range(20):
        worker = multiprocessing.get_context("fork").Process(target=_write_on, args=(path,))
        worker.start()
        assert worker.pid is not None
        try:
            before = agent.read()
            while agent.read() == before:
                pass
            for _ in range(200):
                os.kill(worker.pid, signal.SIGSTOP)
                assert _is_whole(agent.read())
                os.kill(worker.pid, signal.SIGCONT)
                assert _is_whole(agent.read())
        finally:
            worker.kill()
            worker.join()
        last = agent.read()
        assert last.applied > 0
        assert _is_whole(last)


def test_a_damaged_page_is_no_position(path: str) -> None:
    agent = PositionPage(path, create=True)
    agent.write(ONE)
    damaged = bytearray(Path(path).read_bytes())
    where = damaged.index(struct.pack("=d", ONE.since))
    damaged[where : where + 8] = bytes(8)
    Path(path).write_bytes(damaged)
    with pytest.raises(ValueError, match="does not match its checksum"):
        agent.read()


def test_on_a_damaged_page_what_is_no_stretch_is_other(path: str) -> None:
    agent = PositionPage(path, create=True)
    agent.mark(2.5, cast(Any, 7), 1.0)
    assert (agent.read_mark().at, agent.read_mark().kind) == (2.5, Stretch.OTHER)


def test_the_workers_side_creates_nothing(path: str) -> None:
    with pytest.raises(FileNotFoundError):
        PositionPage(path)


def test_a_closed_page_can_be_opened_again(path: str) -> None:
    page = PositionPage(path, create=True)
    page.write(ONE)
    page.close()
    assert PositionPage(path).read() == ONE


def _own_and_fork(path: str, ready: Any) -> None:
    PositionPage(path).own()
    if (child := os.fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)
    ready.set()
    time.sleep(600)


def test_the_owners_end_is_told_and_its_childs_is_not(path: str) -> None:
    PositionPage(path, create=True)
    context = multiprocessing.get_context("fork")
    ready, told = context.Event(), list[bool]()
    owner = context.Process(target=_own_and_fork, args=(path, ready))
    owner.start()
    waiter = threading.Thread(target=lambda: told.append(wait_owner_ended(path)), daemon=True)
    try:
        assert ready.wait(20)
        waiter.start()
        waiter.join(0.1)
        assert waiter.is_alive()
    finally:
        owner.kill()
    waiter.join(20)
    owner.join()
    assert told == [True]


def test_a_page_without_an_owner_is_told_at_once(path: str) -> None:
    PositionPage(path, create=True)
    assert not wait_owner_ended(path)
    PositionPage(path).own()

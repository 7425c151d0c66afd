import multiprocessing
from pathlib import Path

import pytest

from everstep_contract.position import SECONDS, SIZE, Phase, Position, PositionPage, Where

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


def _write_and_die(path: str) -> None:
    page = PositionPage(path)
    for applied in range(2000):
        page.write(Position(epoch=1, applied=applied, since=float(applied)))


def test_the_position_outlives_the_worker_and_is_never_torn(path: str) -> None:
    agent = PositionPage(path, create=True)
    child = multiprocessing.get_context("fork").Process(target=_write_and_die, args=(path,))
    child.start()
    while child.is_alive():
        read = agent.read()
        assert read.since == read.applied
    child.join()
    assert agent.read().applied == 1999


def test_the_workers_side_creates_nothing(path: str) -> None:
    with pytest.raises(FileNotFoundError):
        PositionPage(path)


def test_a_closed_page_can_be_opened_again(path: str) -> None:
    page = PositionPage(path, create=True)
    page.write(ONE)
    page.close()
    assert PositionPage(path).read() == ONE

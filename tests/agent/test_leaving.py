"""When the workers of a member that leaves end. The pages are real; time is an argument."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from agent import given
from everstep_agent.peers.agent_report import State
from everstep_agent.peers.epoch_level import Boundary, EpochLevel, Stage
from everstep_agent.pod.leaving import BOUNDARY_SECONDS, NOTICE_SECONDS, Leaving
from everstep_agent.pod.worker import Worker
from everstep_contract.position import Phase, Position, PositionPage, Where

NOW = 100.0


class Pair:
    """Two local workers with their pages."""

    def __init__(self, folder: Path) -> None:
        self.workers = [self._make(folder, local) for local in range(2)]

    def _make(self, folder: Path, local: int) -> Worker:
        path = str(folder / f"position-{local}")
        page = PositionPage(path, create=True)
        return Worker(
            local=local, life=1, pid=7, page=page, page_path=path, spawned_at=0.0, state=State.TRACKED
        )  # fmt: skip

    def at(self, *applied: int, scope: Where = Where.STEP) -> None:
        for worker, step in zip(self.workers, applied, strict=True):
            worker.page.write(Position(epoch=1, applied=step, phase=Phase.COMPUTING, scope=scope))

    @property
    def armed(self) -> list[int]:
        return [worker.page.armed for worker in self.workers]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    made.at(7, 6)
    yield made
    for worker in made.workers:
        worker.page.close()


def may_end(
    leaving: Leaving,
    pair: Pair,
    now: float = NOW,
    *,
    level: EpochLevel | None = None,
    notice: float | None = None,
) -> bool:
    return leaving.may_end(level or given.an_epoch(), pair.workers, now, notice)


def test_they_take_the_rest_of_the_step_and_ask_at_its_end(pair: Pair) -> None:
    leaving = Leaving()
    assert not may_end(leaving, pair)
    assert pair.armed == [8, 8], "the first boundary that neither has reached"
    assert leaving.step == 8


def test_they_end_once_one_of_them_has_reached_the_boundary(pair: Pair) -> None:
    """Then the sums of that step are complete on all ranks."""
    leaving = Leaving()
    may_end(leaving, pair)
    pair.workers[0].asking = (1, 8)
    assert may_end(leaving, pair)


def test_a_worker_that_passes_the_boundary_while_it_is_armed_gets_a_later_one(pair: Pair) -> None:
    class Late(PositionPage):
        """Its worker takes a step just before the agent arms it."""

        def read(self) -> Position:
            if self.armed == 8:
                self.write(Position(epoch=1, applied=8, phase=Phase.COMPUTING, scope=Where.STEP))
            return super().read()

    late = Late(pair.workers[0].page_path)
    late.write(Position(epoch=1, applied=7, phase=Phase.COMPUTING, scope=Where.STEP))
    pair.workers[0].page.close()
    pair.workers[0].page = late
    assert not may_end(Leaving(), pair)
    assert pair.armed == [9, 9]


@pytest.mark.parametrize(
    "level",
    [
        pytest.param(given.an_epoch(stage=Stage.HOLD), id="the others have lost a member"),
        pytest.param(given.an_epoch(boundary=Boundary(step=9, hold=True)), id="at this boundary"),
    ],
)
def test_they_end_at_once_if_nobody_needs_their_step(pair: Pair, level: EpochLevel) -> None:
    assert may_end(Leaving(), pair, level=level)
    assert pair.armed == [0, 0]


def test_a_loss_of_others_ends_them_in_the_middle_of_the_step(pair: Pair) -> None:
    leaving = Leaving()
    may_end(leaving, pair)
    assert may_end(leaving, pair, level=given.an_epoch(stage=Stage.HOLD))


def test_they_end_at_once_outside_of_steps(pair: Pair) -> None:
    pair.at(7, 7, scope=Where.EVALUATE)
    assert may_end(Leaving(), pair)


def test_they_end_at_once_after_the_last_step(pair: Pair) -> None:
    pair.workers[1].state = State.FINISHED
    assert may_end(Leaving(), pair)


def test_a_long_step_is_not_waited_for(pair: Pair) -> None:
    leaving = Leaving()
    may_end(leaving, pair)
    assert not may_end(leaving, pair, NOW + BOUNDARY_SECONDS - 0.1)
    assert may_end(leaving, pair, NOW + BOUNDARY_SECONDS)


def test_they_end_before_the_notice_is_over(pair: Pair) -> None:
    leaving, notice = Leaving(), NOTICE_SECONDS + 1
    assert not may_end(leaving, pair, notice=notice)
    assert may_end(leaving, pair, NOW + 1, notice=notice - 1)


def test_they_end_at_once_if_the_notice_is_almost_over(pair: Pair) -> None:
    assert may_end(Leaving(), pair, notice=NOTICE_SECONDS)


def test_dead_workers_are_not_waited_for(pair: Pair) -> None:
    pair.workers[0].state = State.DEAD
    leaving = Leaving()
    assert not may_end(leaving, pair)
    assert pair.armed == [0, 7]


def test_a_member_that_stays_after_all_leaves_later_at_a_later_boundary(pair: Pair) -> None:
    leaving = Leaving()
    may_end(leaving, pair)
    leaving.stay()
    assert leaving.step == 0, "a worker that asks at the boundary is answered"
    pair.at(9, 9)
    assert not may_end(leaving, pair, NOW + BOUNDARY_SECONDS)
    assert pair.armed == [10, 10]

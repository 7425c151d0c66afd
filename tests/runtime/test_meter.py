"""To which category a worker's seconds are charged."""

import time
from pathlib import Path

import pytest
import torch

from agent.gang import Gang
from everstep import Job, meter, run
from everstep.meter import Meter
from everstep_agent.pod import hang, spawn
from everstep_contract.position import PositionPage, Stretch, Where


class Clock:
    """A clock that stands still and counts how often it is read."""

    def __init__(self) -> None:
        self.now, self.reads = 100.0, 0

    def monotonic(self) -> float:
        self.reads += 1
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(meter, "time", clock)
    return clock


def train(clock: Clock) -> Meter:
    found = Meter(None, epoch=1, applied=0)
    clock.now += 1.0
    found.enter(Where.STEP, category="step")
    return found


def fetch(found: Meter, clock: Clock, seconds: float, error: Exception | None = None) -> None:
    with found.fetching():
        clock.now += seconds
        if error:
            raise error


def test_waiting_for_data_is_no_part_of_the_step(clock: Clock) -> None:
    found = train(clock)
    for fetched, computed in ((0.5, 2.0), (0.25, 2.0)):
        fetch(found, clock, fetched)
        clock.now += computed
    found.update()
    assert found.seconds() == {"startup": 1.0, "data": 0.75, "step": 4.0}


def test_a_fetch_that_fails_is_charged_and_the_step_goes_on(clock: Clock) -> None:
    found = train(clock)
    with pytest.raises(OSError, match="gone"):
        fetch(found, clock, 0.5, OSError("gone"))
    clock.now += 1.0
    found.update()
    assert found.seconds() == {"startup": 1.0, "data": 0.5, "step": 1.0}


@pytest.mark.parametrize(
    ("where", "category", "expected"),
    [
        (Where.STARTUP, "startup", {"startup": 4.5}),
        (Where.EVALUATE, "evaluate", {"startup": 1.0, "step": 0.0, "data": 0.5, "evaluate": 3.0}),
    ],
    ids=["the first step is start-up", "an evaluation"],
)
def test_where_else_data_is_fetched(
    clock: Clock, where: Where, category: str, expected: dict[str, float]
) -> None:
    found = train(clock) if where is Where.EVALUATE else Meter(None, epoch=1, applied=0)
    clock.now += 1.0 if where is Where.STARTUP else 0.0
    found.enter(where, category=category)
    fetch(found, clock, 0.5)
    clock.now += 3.0
    found.update()
    assert found.seconds() == expected


def test_no_second_is_lost_or_counted_twice(clock: Clock) -> None:
    found = train(clock)
    for _ in range(3):
        fetch(found, clock, 0.5)
        clock.now += 1.0
        with found.charging("wait", waiting=True):
            clock.now += 0.25
        with found.charging("stall"):
            clock.now += 0.125
        found.enter(Where.STEP, category="step")
    assert sum(found.seconds().values()) == clock.now - 100.0


def test_the_time_in_which_a_rank_waits_for_others_is_none_of_its_own(
    clock: Clock, tmp_path: Path
) -> None:
    page = PositionPage(str(tmp_path / "page"), create=True)
    found, limits = Meter(page, epoch=1, applied=0), hang.Limits(step=300.0, startup=600.0)

    def is_hung() -> bool:
        now = clock.now
        return bool(hang.classify_hang(page.read(), started=0.0, cut=None, limits=limits, now=now))

    found.enter(Where.STEP, category="step")
    clock.now += 200.0
    with found.charging("wait", waiting=True), found.charging("stall", waiting=True):
        clock.now += 400.0
    assert not is_hung()
    clock.now += 99.0
    assert not is_hung()
    clock.now += 2.0
    assert is_hung(), "it has computed for 301 s"
    with found.charging("wait", waiting=True):
        clock.now += 50.0
        found.enter(Where.STEP, category="step")
        clock.now += 50.0
    clock.now += 299.0
    assert not is_hung()


def test_charging_a_fetch_reads_the_clock_no_more_often_than_its_two_marks(clock: Clock) -> None:
    found = train(clock)
    before = clock.reads
    fetch(found, clock, 0.5)
    assert clock.reads - before == 2


def test_what_moves_in_a_sum_is_progress_and_what_cannot_be_told_may_be(
    clock: Clock, tmp_path: Path
) -> None:
    page = PositionPage(str(tmp_path / "page"), create=True)
    found = Meter(page, epoch=1, applied=0)
    found.enter(Where.STEP, category="step")
    with found.summing():
        began = clock.now
        marks = {}
        for second, moved in enumerate([100, 150, 150, 150, None, None]):
            clock.now = began + second
            found.look(moved)
            marks[second] = page.read_mark()
        assert {m.kind for m in marks.values()} == {Stretch.SUM}
        assert [m.at - began for m in marks.values()] == [0, 1, 1, 1, 4, 5]
        assert (marks[3].looked - began, marks[3].at - began) == (3, 1)
    assert page.read_mark().kind is Stretch.COMPUTE


class Slow:
    """A dataset that takes 10 ms for each sample."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.01)
        return torch.ones(2)


def train_slowly(job: Job) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    job.track(model=model, optimizer=optimizer)
    data = job.batches(Slow(), global_batch=8, micro_batch=2)
    for step in job.steps(until=6):
        for batch in step.batches(data):
            step.backward(model(batch).mean())
        optimizer.step()


async def test_a_job_tells_how_long_its_ranks_waited_for_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real agents and workers take 5 steps of 8 samples. The first step counts as start-up."""
    forked = spawn.ForkSpawner(lambda: run(train_slowly, seed=1))
    monkeypatch.setattr(spawn, "SubprocessSpawner", lambda _: forked)
    async with Gang(tmp_path, 2) as gang:
        seen = await gang.until(lambda s: s.done, 60)
        await gang.reports()
    assert seen.seconds["data"] >= 5 * 8 * 0.01

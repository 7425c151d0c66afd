"""To which category the worker's seconds are charged, by a clock that the test sets."""

import pytest

from everstep import meter
from everstep.meter import Meter
from everstep_contract.position import Where


class Clock:
    """Stands still; counts how often it is read."""

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


def test_charging_a_fetch_reads_the_clock_no_more_often_than_its_two_marks(clock: Clock) -> None:
    found = train(clock)
    before = clock.reads
    fetch(found, clock, 0.5)
    assert clock.reads - before == 2

"""Calls are frequent after news and rare in a quiet job."""

import asyncio

import pytest

from everstep_agent.agent import QUIET_WATCH_SECONDS
from everstep_agent.coordinator.term import QUIET_TICK_SECONDS
from everstep_agent.pace import GRID_SECONDS, LIVELY_SECONDS, Pace, until_grid
from everstep_agent.pod.progress_watch import MOVING_LOOK_SECONDS


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_quiet_some_time_after_the_last_news() -> None:
    clock = Clock()
    pace = Pace(0.1, 1.0, clock)
    assert pace.period_seconds == 0.1
    clock.now += LIVELY_SECONDS
    assert pace.period_seconds == 1.0
    pace.note_news()
    assert pace.period_seconds == 0.1


async def test_an_event_is_news_and_a_period_that_ends_is_none() -> None:
    clock, event = Clock(), asyncio.Event()
    pace = Pace(0.001, 60.0, clock)
    clock.now += LIVELY_SECONDS - 1.0
    await pace.wait_for_news(event)
    clock.now += 1.0
    assert pace.period_seconds == 60.0
    event.set()
    await pace.wait_for_news(event)
    assert pace.period_seconds == 0.001


@pytest.mark.parametrize("period", [QUIET_TICK_SECONDS, QUIET_WATCH_SECONDS, MOVING_LOOK_SECONDS])
@pytest.mark.parametrize("late", [0.0, 0.001, 0.07, 0.08, 0.149])
def test_a_period_ends_with_the_others(period: float, late: float) -> None:
    now = 1000 * GRID_SECONDS + late
    seconds = until_grid(period, now)
    assert seconds == pytest.approx(period, abs=GRID_SECONDS / 2 + 1e-6)
    ends = (now + seconds) / GRID_SECONDS
    assert ends == pytest.approx(round(ends), abs=1e-6)


def test_two_periods_of_one_length_never_end_at_the_same_point() -> None:
    """A timer may ring a little too early."""
    first = 1000 * GRID_SECONDS - 1e-6
    assert until_grid(MOVING_LOOK_SECONDS, first) > GRID_SECONDS / 2


def test_a_short_period_stays_as_it_is() -> None:
    assert until_grid(0.05, 12.34) == 0.05

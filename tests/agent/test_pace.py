"""Calls are frequent after news and rare in a quiet job."""

import asyncio

from everstep_agent.pace import LIVELY_SECONDS, Pace


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

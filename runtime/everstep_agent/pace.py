"""How often an agent repeats its report, and the coordinator its checks, while nothing happens."""

import asyncio
import time
from collections.abc import Callable

from everstep_agent.waiting import happens

GRID_SECONDS = 0.15
"""A period of at least this length ends at a multiple of it on the clock. So an agent's regular tasks share
wake-ups, each of which costs 0.6 ms of a core beside busy ranks.
"""
LIVELY_SECONDS = 3.0
"""How long after news the job counts as lively; after that, everything is repeated less often."""


def until_grid(seconds: float, now: float) -> float:
    """Seconds from `now` to the multiple of `GRID_SECONDS` that is nearest to the end of the period; a
    period that is shorter than `GRID_SECONDS` stays as it is.
    """
    if seconds < GRID_SECONDS:
        return seconds
    return round((now + seconds) / GRID_SECONDS) * GRID_SECONDS - now


class Pace:
    """`lively`: seconds between two repetitions soon after news. `quiet`: the same without news."""

    def __init__(
        self, lively: float, quiet: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._lively, self._quiet, self._clock = lively, quiet, clock
        self._news_at = clock()

    def note_news(self) -> None:
        self._news_at = self._clock()

    @property
    def period_seconds(self) -> float:
        is_lively = self._clock() - self._news_at < LIVELY_SECONDS
        return self._lively if is_lively else self._quiet

    async def wait_for_news(self, event: asyncio.Event) -> None:
        """Wait until the event is set, at most about one period."""
        if await happens(event, until_grid(self.period_seconds, self._clock())):
            self.note_news()

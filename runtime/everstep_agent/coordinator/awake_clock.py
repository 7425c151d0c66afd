"""A clock that stands still while this process does.

Who was stopped (a paused virtual machine, a suspended laptop, a machine without a free core) has heard
nobody meanwhile. Its first look at the others' reports would take all of them for silent.
"""

import asyncio
import time
from collections.abc import Callable

LOOK_SECONDS = 0.5
STOPPED_SECONDS = 2.0
"""A longer time between two looks counts as this much."""


class AwakeClock:
    """Call it for the time in seconds, as of `time.monotonic` less the time that does not count."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()
        self._left_out = 0.0

    def __call__(self) -> float:
        now = self._clock()
        self._left_out += max(0.0, now - self._last - STOPPED_SECONDS)
        self._last = now
        return now - self._left_out

    async def run(self) -> None:
        """Looks again and again, so that only a stop leaves a long time between two looks."""
        while True:
            self()
            await asyncio.sleep(LOOK_SECONDS)

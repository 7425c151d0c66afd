"""A clock that does not advance while this process is stopped.

A process that was stopped (a paused virtual machine, a suspended laptop, a machine without a free
core) has received no reports in that time. Without this clock, its first look at the reports would
take all other agents for silent.
"""

import asyncio
import time
from collections.abc import Callable

from everstep_agent.pace import until_grid

LOOK_SECONDS = 0.5
STOPPED_SECONDS = 2.0
"""A longer time between two reads of the clock counts as this much."""


class AwakeClock:
    """Calling it returns `time.monotonic` minus the time that does not count, in seconds."""

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
        """Read the clock regularly, so that only a stop leaves a long time between two reads."""
        while True:
            self()
            await asyncio.sleep(until_grid(LOOK_SECONDS, time.monotonic()))

"""A limit on how fast copies are sent or read, so that they do not slow the training down."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable


class Budget:
    """
    Args:
        rate: bytes a second, on average.
    """

    def __init__(
        self,
        rate: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._rate, self._clock, self._sleep = rate, clock, sleep
        self._free_at = 0.0
        """When, at this rate, everything that was taken has been sent."""

    def lift(self) -> None:
        """From now on there is no limit."""
        self._rate, self._free_at = math.inf, 0.0

    async def take(self, count: int) -> None:
        """Returns when `count` bytes may be sent. Time in which nothing was sent gives no credit."""
        now = self._clock()
        begin = max(now, self._free_at)
        self._free_at = begin + count / self._rate
        if begin > now:
            await self._sleep(begin - now)

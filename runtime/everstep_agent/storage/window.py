"""How many requests may run at once: one more for each full round of successes, half when the store
is busy.

Additive increase, multiplicative decrease, as TCP's congestion control (Chiu and Jain, 1989).
With back-off alone, all waiting requests would return at once and be refused at once.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from everstep_agent.storage.errors import Busy

T = TypeVar("T")


class Window:
    def __init__(self, most: int = 8) -> None:
        self._most = most
        self._limit = float(most)
        self._under_way = 0
        self._halvings = 0
        self._room = asyncio.Event()

    @property
    def limit(self) -> int:
        """How many requests may run now; at least 1."""
        return int(self._limit)

    async def run(self, call: Callable[[], Awaitable[T]]) -> T:
        """Run `call` once there is room. Raises what `call` raises."""
        while self._under_way >= self.limit:
            self._room.clear()
            await self._room.wait()
        self._under_way += 1
        halvings = self._halvings
        try:
            answer = await call()
            self._limit = min(self._most, self._limit + 1 / self._limit)
        except Busy:
            self._halve(halvings)
            raise
        finally:
            self._under_way -= 1
            self._room.set()
        return answer

    def _halve(self, seen: int) -> None:
        """Halve the limit once for all requests that ran at the same time: they were refused for
        the same reason.
        """
        if seen == self._halvings:
            self.halve()

    def halve(self) -> None:
        self._halvings += 1
        self._limit = max(1.0, self._limit / 2)

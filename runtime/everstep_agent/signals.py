"""A change that many may wait for at once, without a lock that a cancelled waiter could keep."""

import asyncio
from collections.abc import Callable


class Change:
    def __init__(self) -> None:
        self._next = asyncio.Event()

    def fire(self) -> None:
        """Wake everybody who waits now."""
        self._next.set()
        self._next = asyncio.Event()

    async def until(self, true: Callable[[], bool], seconds: float) -> bool:
        """Wait for it to become true, at most so long; whether it did."""
        try:
            async with asyncio.timeout(seconds):
                while not true():
                    await self._next.wait()
        except TimeoutError:
            return true()
        return True

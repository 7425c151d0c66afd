"""Waiting for something at most so long, such that a cancellation is never lost.

`asyncio.wait_for` loses one in Python 3.11 if what it waits for happens in the same turn of the
loop: the task goes on, and who cancelled it waits for ever (seen: an agent that did not end).
"""

import asyncio
from collections.abc import Callable


async def happens(event: asyncio.Event, seconds: float) -> bool:
    """Whether the event is set within `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return event.is_set()


class Change:
    """Many may wait for it at once, without a lock that a cancelled waiter could keep."""

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

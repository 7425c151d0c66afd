"""Waits with a time limit that never lose a cancellation.

`asyncio.wait_for` loses one in Python 3.11 if the awaited event happens in the same iteration of
the event loop: the task continues, and whoever cancelled it waits forever (seen: an agent that did
not end).
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def happens(event: asyncio.Event, seconds: float) -> bool:
    """Whether the event is set within `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return event.is_set()


async def result_unless(
    work: Coroutine[Any, Any, T], stop: Callable[[], bool], poll_seconds: float
) -> T | None:
    """What `work` returns or raises; None, with `work` cancelled, if `stop` becomes true first."""
    task = asyncio.create_task(work)
    try:
        while not task.done() and not stop():
            await asyncio.wait([task], timeout=poll_seconds)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class Change:
    """A broadcast event. Many tasks can wait at once, without a lock that a cancelled waiter could
    keep.
    """

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def fire(self) -> None:
        """Wake all current waiters."""
        self._next.set()
        self._next = asyncio.Event()

    async def until(self, true: Callable[[], bool], seconds: float) -> bool:
        """Wait at most `seconds` for `true` to return true. Return whether it did."""
        try:
            async with asyncio.timeout(seconds):
                while not true():
                    await self._next.wait()
        except TimeoutError:
            return true()
        return True

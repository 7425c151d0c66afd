"""Limits the rate of writes and the number of passes that run at once.

A recovery may use the full token bucket, everything else only the half that is not reserved for
recoveries.
"""

import asyncio
import enum
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar


class Lane(enum.Enum):
    RECOVERY = "recovery"
    START = "start"
    """New pods of jobs that start or grow: like STATUS, but a pass that waits keeps its place, because
    each plan holds the pods that it creates.
    """
    STATUS = "status"


class Bucket:
    """A token bucket with lanes; first come, first served within a lane."""

    def __init__(self, qps: float, burst: int) -> None:
        self._qps, self._burst = qps, float(burst)
        self._tokens, self._at = float(burst), time.monotonic()
        self._turns = {lane: asyncio.Lock() for lane in Lane}
        self.waited_seconds = 0.0

    async def take(self, lane: Lane) -> None:
        """Take a token. While a pass waits in the status lane, it gives its place to others, so
        that figures do not delay a recovery.
        """
        if lane is not Lane.STATUS or self._is_free(lane):
            await self._wait(lane)
            return
        async with without_place():
            await self._wait(lane)

    async def _wait(self, lane: Lane) -> None:
        async with self._turns[lane]:
            while (lack := self._lack(lane)) > 0:
                pause = lack / self._qps
                self.waited_seconds += pause
                await asyncio.sleep(pause)
            self._tokens -= 1

    def _is_free(self, lane: Lane) -> bool:
        return not self._turns[lane].locked() and self._lack(lane) <= 0

    def _lack(self, lane: Lane) -> float:
        floor = 0.0 if lane is Lane.RECOVERY else min(self._burst / 2, self._burst - 1)
        return floor + 1 - self._refilled()

    def _refilled(self) -> float:
        now = time.monotonic()
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._qps)
        self._at = now
        return self._tokens


class Places:
    """Limits how many passes run at once."""

    def __init__(self, at_once: int) -> None:
        self._room = asyncio.Semaphore(at_once)

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        place = Place(self._room)
        await place.take()
        token = _PLACE.set(place)
        try:
            yield
        finally:
            _PLACE.reset(token)
            place.give()


class Place:
    """One pass's place among those that run at once. A second `give` has no effect, because a pass
    may end while it has given up its place.
    """

    def __init__(self, room: asyncio.Semaphore) -> None:
        self._room = room
        self._held = False

    async def take(self) -> None:
        await self._room.acquire()
        self._held = True

    def give(self) -> None:
        if self._held:
            self._held = False
            self._room.release()


_PLACE: ContextVar[Place | None] = ContextVar("place", default=None)
"""The place of the pass that runs in this task. It is a context variable, because the bucket is far
below the scheduler and has other users, too.
"""


@asynccontextmanager
async def without_place() -> AsyncIterator[None]:
    place = _PLACE.get()
    if place is None:
        yield
        return
    place.give()
    yield  # a pass cancelled here ends without taking its place back
    await place.take()

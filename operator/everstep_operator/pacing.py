"""How fast we write: a recovery may use the whole bucket, all else only what lies above the half kept
for recoveries.
"""

import asyncio
import enum
import time


class Lane(enum.Enum):
    RECOVERY = "recovery"
    STATUS = "status"


class Bucket:
    """A token bucket with two lanes; waiting is first come, first served within a lane."""

    def __init__(self, qps: float, burst: int) -> None:
        self._qps, self._burst = qps, float(burst)
        self._tokens, self._at = float(burst), time.monotonic()
        self._turns = {lane: asyncio.Lock() for lane in Lane}
        self.waited_seconds = 0.0

    async def take(self, lane: Lane) -> None:
        floor = 0.0 if lane is Lane.RECOVERY else self._burst / 2
        async with self._turns[lane]:
            while (lack := floor + 1 - self._refilled()) > 0:
                pause = lack / self._qps
                self.waited_seconds += pause
                await asyncio.sleep(pause)
            self._tokens -= 1

    def _refilled(self) -> float:
        now = time.monotonic()
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._qps)
        self._at = now
        return self._tokens

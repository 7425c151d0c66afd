"""Retries requests while an error may pass: with jittered exponential back-off, a deadline, and
fewer concurrent requests while the store is busy.

A repeated `create` may find the object of its own first try. It then raises `AlreadyExists`, as
`ObjectStore` documents.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from everstep_agent.storage.errors import Denied, NoIdentity, StoreError, Unreachable
from everstep_agent.storage.store import SLOWEST, ObjectStore, S
from everstep_agent.storage.window import Window

T = TypeVar("T")

DOUBTED = 3
"""A denied request is repeated this many times. MinIO answers 403 to a PUT concurrent with a DELETE
that empties the folder (measured), and permissions that were just granted take a moment to apply.
"""
UNREADY = 12
"""So often if the machine's cloud identity does not answer: for 12 to 24 s with the usual delays."""

READS = 32
"""The most reads at once: those of the run log's entries, which are small (`RunLog`). Readers of chunks
have lower limits of their own.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    deadline_s: float = 60.0
    """For one call: after it, nothing is tried again. A try that moves data may take longer."""
    first_s: float = 0.1
    longest_s: float = 3.0

    @property
    def longest_read_s(self) -> float:
        """For one try that reads: a chunk of 64 MiB at `SLOWEST`, and the size is not known before.
        A server that sends nothing is given up much earlier (`STALL_SECONDS`).
        """
        return self.deadline_s * 2.2

    @property
    def longest_list_s(self) -> float:
        """For one try that lists: any number of pages of 1,000 keys. A server that sends no page is
        given up much earlier (`STALL_SECONDS`).
        """
        return self.deadline_s * 60


def choose_delay(tries: int, patience: Patience, chance: float) -> float:
    """Seconds before try number `tries + 1`; `chance` in [0, 1) spreads the callers."""
    ceiling = min(patience.longest_s, patience.first_s * 2.0 ** min(tries - 1, 30))
    return ceiling * (0.5 + chance / 2)


def _count_doubts(error: Denied) -> int:
    return UNREADY if isinstance(error, NoIdentity) else DOUBTED


class Retrying:
    """An `ObjectStore` that wraps another.

    Writes (`put`) and reads (`get`, `stream`) have a window each, so the run log's reader does not
    wait for uploads. The run log's entries (`create`) have none, so they wait for no chunks.
    """

    def __init__(
        self,
        inner: ObjectStore,
        patience: Patience | None = None,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._inner = inner
        self._patience = patience or Patience()
        self._sleep = sleep
        self._chance = chance
        self._waiting: dict[object, StoreError] = {}
        """Call that will be tried again → its last error."""
        self._given_up: StoreError | None = None
        """Error of the newest call that was given up, until the store answers any call."""
        self._open = 0
        """How many calls wait for an answer."""
        self._heard_at = 0.0
        """When the store last answered a call, or the first one that waits began."""
        self._writes, self._reads = Window(), Window(READS)

    @property
    def uri(self) -> str:
        return self._inner.uri

    @property
    def trouble(self) -> StoreError | None:
        """The error that a call is waiting out, for the status; None: there is none. An answer to
        another call does not end it: a store that is full takes reads.
        """
        return next(iter(self._waiting.values()), self._given_up)

    @property
    def silent_seconds(self) -> float:
        """For how long calls wait, and none was answered; 0: no call waits."""
        now = asyncio.get_running_loop().time()
        return now - self._heard_at if self._open else 0.0

    async def put(self, key: str, body: bytes | memoryview) -> None:
        await self._again(
            lambda: self._writes.run(lambda: self._inner.put(key, body)), len(body) / SLOWEST
        )

    async def create(self, key: str, body: bytes | memoryview) -> None:
        await self._again(lambda: self._inner.create(key, body), len(body) / SLOWEST)

    async def get(self, key: str) -> bytes:
        return await self._again(
            lambda: self._reads.run(lambda: self._inner.get(key)), self._patience.longest_read_s
        )

    async def stream(
        self, key: str, begin: Callable[[], S], *, urgent: bool = False
    ) -> tuple[int, S]:
        return await self._again(
            lambda: self._reads.run(lambda: self._inner.stream(key, begin, urgent=urgent)),
            self._patience.longest_read_s,
        )

    async def list(self, prefix: str = "", *, after: str = "") -> list[str]:
        return await self._again(
            lambda: self._inner.list(prefix, after=after), self._patience.longest_list_s
        )

    async def delete(self, key: str) -> None:
        await self._again(lambda: self._inner.delete(key))

    async def _again(self, call: Callable[[], Awaitable[T]], least_s: float = 0.0) -> T:
        """
        Args:
            least_s: each try may take so long, whatever is left until the deadline.
        """
        this, clock = object(), asyncio.get_running_loop().time
        self._heard_at = self._heard_at if self._open else clock()
        self._open += 1
        try:
            answer = await self._repeat(call, least_s, this)
        except StoreError as error:
            self._given_up = error if error.transient else None  # else it answered
            self._heard_at = self._heard_at if error.transient else clock()
            raise
        finally:
            self._open -= 1
            self._waiting.pop(this, None)
        self._given_up, self._heard_at = None, clock()
        return answer

    async def _repeat(self, call: Callable[[], Awaitable[T]], least_s: float, this: object) -> T:
        clock = asyncio.get_running_loop().time
        until = clock() + self._patience.deadline_s
        tries = 0
        while True:
            tries += 1
            try:
                return await self._once(call, max(until - clock(), least_s))
            except StoreError as error:
                delay = choose_delay(tries, self._patience, self._chance())
                if not (isinstance(error, Denied) and tries <= _count_doubts(error)):
                    if not error.transient or clock() + delay >= until:
                        raise
                    self._waiting[this] = error
            await self._sleep(delay)

    async def _once(self, call: Callable[[], Awaitable[T]], left_s: float) -> T:
        try:
            async with asyncio.timeout(max(left_s, 0.001)):
                return await call()
        except TimeoutError:
            raise Unreachable(
                f"{self.uri} did not complete a request within {left_s:.0f} s"
            ) from None

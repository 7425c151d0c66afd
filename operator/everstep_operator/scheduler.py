"""When each object gets its next pass: one heap, one task, a few passes at once, never two for one
object.
"""

import asyncio
import heapq
import logging
import time
from collections.abc import Awaitable, Callable

from everstep_operator import kube, logs
from everstep_operator.pacing import Places

Key = tuple[str, str]
RETRY_SECONDS = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)

log = logging.getLogger(__name__)


class Scheduler:
    """`run_pass` returns in how many seconds the object is due again; None: only when it is woken.

    A failure is logged once, and again only if its text changes or after a pass has succeeded.
    """

    def __init__(
        self,
        run_pass: Callable[[Key], Awaitable[float | None]],
        *,
        at_once: int = 8,
        on_pass: Callable[[str, float], None] = lambda outcome, seconds: None,
    ) -> None:
        self._run_pass = run_pass
        self._on_pass = on_pass
        self._due: dict[Key, float] = {}
        self._heap: list[tuple[float, Key]] = []
        self._busy: set[Key] = set()
        self._failures: dict[Key, int] = {}
        self._said: dict[Key, str] = {}
        self._stirred = asyncio.Event()
        self._places = Places(at_once)
        self.beat = time.monotonic()
        """When the loop last turned, for the liveness probe."""

    def wake(self, key: Key, after: float = 0.0) -> None:
        """Request a pass. Of several requests for one object, the earliest time counts."""
        at = time.monotonic() + after
        if self._due.get(key, float("inf")) <= at:
            return
        self._due[key] = at
        heapq.heappush(self._heap, (at, key))
        self._stirred.set()

    @property
    def waiting(self) -> int:
        return len(self._due)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                self._stirred.clear()
                self.beat = time.monotonic()
                for key in self._take_due():
                    self._busy.add(key)
                    group.create_task(self._pass(key), name=f"pass {key[0]}/{key[1]}")
                await self._pause()

    def _take_due(self) -> list[Key]:
        now, found = time.monotonic(), []
        later: list[tuple[float, Key]] = []
        while self._heap and self._heap[0][0] <= now:
            at, key = heapq.heappop(self._heap)
            if self._due.get(key) != at:
                continue
            if key in self._busy:
                later.append((at, key))
                continue
            del self._due[key]
            found.append(key)
        for entry in later:
            heapq.heappush(self._heap, entry)
        return found

    async def _pause(self) -> None:
        """Wait until the next object is due, an object is woken, or a pass ends. A busy object's
        turn comes when its pass ends.
        """
        free = [at for at, key in self._heap[:64] if key not in self._busy]
        pause = min([5.0, *(max(0.0, at - time.monotonic()) for at in free)])
        try:
            async with asyncio.timeout(pause):
                await self._stirred.wait()
        except TimeoutError:
            return

    async def _pass(self, key: Key) -> None:
        began = time.monotonic()
        outcome = "Done"
        try:
            async with self._places.held():
                after = await self._run_pass(key)
            self._note_success(key)
        except Exception as error:  # the outer edge: one bad object must not stop the others
            outcome = type(error).__name__
            after = self._after_failure(key, error)
        finally:
            self._busy.discard(key)
            self._stirred.set()
        if after is not None:
            self.wake(key, after)
        self._on_pass(outcome, time.monotonic() - began)

    def _after_failure(self, key: Key, error: Exception) -> float:
        count = self._failures[key] = self._failures.get(key, 0) + 1
        after = RETRY_SECONDS[min(count, len(RETRY_SECONDS)) - 1]
        known = isinstance(error, kube.KubeError)
        after = max(after, error.retry_after if isinstance(error, kube.KubeError) else 0.0)
        text = f"{type(error).__name__}: {error}"
        if self._said.get(key) != text:
            log.error(
                "%s/%s: pass failed (%d in a row), again in %.0f s: %s",
                *key, count, after, text, exc_info=None if known else error,
                extra=logs.fields(job="/".join(key)),
            )  # fmt: skip
        self._said[key] = text
        return after

    def _note_success(self, key: Key) -> None:
        count = self._failures.pop(key, 0)
        if self._said.pop(key, None) is not None:
            log.info(
                "%s/%s: a pass succeeds again, after %d that failed",
                *key, count, extra=logs.fields(job="/".join(key)),
            )  # fmt: skip

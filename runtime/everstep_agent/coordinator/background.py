"""Background work: training never waits for it."""

import asyncio
from collections.abc import Awaitable

from everstep_agent import logline
from everstep_agent.storage.errors import StoreError


class Background:
    """A store error is logged and the work is dropped, because the next commit starts it again. Any
    other exception is a bug in Everstep and ends the coordinator's term.
    """

    def __init__(self, line: logline.Log) -> None:
        self._refused = logline.Once(line, "background_work_failed")
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed = asyncio.Event()
        self._error: Exception | None = None

    def start(self, work: Awaitable[None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(self._guard(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _guard(self, work: Awaitable[None]) -> None:
        try:
            await work
        except StoreError as error:
            self._refused.say(kind=error.kind, message=str(error))
        except Exception as error:
            self.fail(error)
        else:
            self._refused.passed()

    def fail(self, error: Exception) -> None:
        self._error = self._error or error
        self._failed.set()

    async def wait_failed(self) -> None:
        """Raises the first exception of background work that is not a store error."""
        await self._failed.wait()
        assert self._error is not None
        raise self._error

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

"""Many calls to a possibly slow API server: a few at a time, each retried until it is answered."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from everstep_lab.api import ApiError, UnreachableError

AT_ONCE = 8
PAUSE_SECONDS = 1.0
_PASSING = frozenset({429, 500, 503, 504})
Call = Callable[[], Awaitable[object]]


class Caller:
    """Makes at most AT_ONCE calls at a time."""

    def __init__(self) -> None:
        self._room = asyncio.Semaphore(AT_ONCE)

    async def persist(self, call: Call) -> None:
        """Retry `call` until it succeeds. If a create's answer was lost, "already exists" counts as
        success.
        """
        async with self._room:
            answered = await _try(call)
            while not answered:
                await asyncio.sleep(PAUSE_SECONDS)
                answered = await _try(call)

    async def all(self, calls: Iterable[Call]) -> None:
        async with asyncio.TaskGroup() as group:
            for call in calls:
                group.create_task(self.persist(call))


async def _try(call: Call) -> bool:
    try:
        await call()
    except UnreachableError:
        return False
    except ApiError as error:
        if error.reason == "AlreadyExists":
            return True
        if error.status not in _PASSING:
            raise
        return False
    return True

"""Many calls to an API server that may be slow: a few at once, each until it is answered."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from everstep_lab.api import ApiError, UnreachableError

AT_ONCE = 8
PAUSE_SECONDS = 1.0
_PASSING = frozenset({429, 500, 503, 504})
Call = Callable[[], Awaitable[object]]


class Caller:
    """At most AT_ONCE calls are under way."""

    def __init__(self) -> None:
        self._room = asyncio.Semaphore(AT_ONCE)

    async def persist(self, call: Call) -> None:
        """What was created by a call whose answer was lost counts as created."""
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

"""Calls to the store that are repeated until it answers."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from everstep_agent import logline
from everstep_agent.storage.errors import StoreError
from everstep_contract import levels

T = TypeVar("T")
STORE_PAUSE_SECONDS = 1.0


class StoreWaits:
    """An unavailable store costs a running job nothing but its next commit, so these calls have no
    time limit. `trouble` is the error for which a call waits; the operator shows it.

    `may_fail`: whether errors that a retry cannot fix are raised. Before the first epoch, a start
    with wrong credentials fails at once. Later the workers may hold the only copy of the state, and
    access may be restored while they train.
    """

    def __init__(
        self, line: logline.Log, may_fail: Callable[[], bool], on_change: Callable[[], None]
    ) -> None:
        self._line = line
        self._may_fail = may_fail
        self._on_change = on_change
        self._waiting: dict[logline.Once, levels.StorageError] = {}

    @property
    def trouble(self) -> levels.StorageError | None:
        return next(iter(self._waiting.values()), None)

    async def persist(self, call: Callable[[], Awaitable[T]]) -> T:
        """Repeat the call until it succeeds. Raises `StoreError` only as `may_fail` allows."""
        waits = logline.Once(self._line, "store_waits")
        try:
            while True:
                try:
                    answer = await call()
                except StoreError as error:
                    if not error.transient and self._may_fail():
                        raise
                    self._waiting[waits] = error.to_level()
                    waits.say(kind=error.kind, message=str(error))
                    self._on_change()
                    await asyncio.sleep(STORE_PAUSE_SECONDS)
                else:
                    waits.passed()
                    return answer
        finally:
            self._waiting.pop(waits, None)

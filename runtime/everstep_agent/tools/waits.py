"""Tells the person who started a command that it waits for the store: what happens, and what to do."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Sequence

from everstep_agent.storage.retrying import Retrying
from everstep_contract.fetched import WAITS

TELL_SECONDS = 4.0
AGAIN_SECONDS = 30.0
LOOK_SECONDS = 1.0


@contextlib.asynccontextmanager
async def telling(stores: Sequence[Retrying]) -> AsyncIterator[None]:
    """Tell it on stderr while one of these stores, to which more may be added, answers nothing."""
    task = asyncio.create_task(_tell(stores))
    try:
        yield
    finally:
        task.cancel()


async def _tell(stores: Sequence[Retrying]) -> None:
    due: dict[str, float] = {}
    """URI of a silent store → length of its silence at which it is told again."""
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        for store in stores:
            silent = store.silent_seconds
            if silent < TELL_SECONDS:
                due.pop(store.uri, None)
            elif silent >= due.get(store.uri, 0.0):
                due[store.uri] = silent + AGAIN_SECONDS
                with contextlib.suppress(OSError):  # a closed stderr does not end the command
                    print(describe(store, silent), file=sys.stderr, flush=True)


def describe(store: Retrying, silent: float) -> str:
    found = store.trouble or f"{store.uri} has completed no request for {silent:.0f} s"
    return (
        f"{WAITS}{found}. Everstep repeats each request for up to a minute; check the store and the network to it,"
        " or end this command with Ctrl-C"
    )

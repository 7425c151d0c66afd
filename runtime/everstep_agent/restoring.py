"""Bringing the checkpoint of a new epoch into this pod's memory, however long the store takes."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from everstep_agent.checkpoint.restore import Fetched, fetch_checkpoint
from everstep_agent.storage.errors import StoreError
from everstep_agent.storage.store import ObjectStore
from everstep_contract import levels, log

RETRY_SECONDS = 1.0
MORE_ROOM = "raise spec.checkpoint.stagingMemory if this stays"


async def fetch(
    store: ObjectStore,
    commit: log.Commit | None,
    folder: Path,
    on_wait: Callable[[levels.StorageError | None], None],
) -> Fetched | None:
    """The verified files of `commit`; None for a start from nothing.

    `on_wait` is told what is waited out, and with None that it has passed.

    Raises:
        Broken: this checkpoint cannot be had, now or later.
    """
    if commit is None:
        return None
    while True:
        try:
            fetched = await fetch_checkpoint(store, commit, folder)
        except StoreError as error:
            # Even a refusal says nothing against the checkpoint: an older one would lose steps.
            on_wait(error.to_level())
            await asyncio.sleep(RETRY_SECONDS)
        except OSError as error:
            # Nor does a full folder: those who still map the last one's files give room as they end.
            text = f"no room for the checkpoint of step {commit.step} in {folder}: {error}"
            on_wait(levels.StorageError(kind="NoRoom", message=f"{text}; {MORE_ROOM}"))
            await asyncio.sleep(RETRY_SECONDS)
        else:
            on_wait(None)
            return fetched

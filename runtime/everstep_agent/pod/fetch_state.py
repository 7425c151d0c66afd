"""Downloads the checkpoint of a new epoch into this pod's memory, however long the store takes."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from everstep_agent import logline
from everstep_agent.checkpoint.manifests import Broken
from everstep_agent.checkpoint.memory_tier import MemoryTier
from everstep_agent.checkpoint.restore import Fetched, fetch_checkpoint
from everstep_agent.checkpoint.tiers import Tier
from everstep_agent.peers.messages import BrokenCheckpoint
from everstep_agent.storage.errors import StoreError
from everstep_agent.storage.store import ObjectStore
from everstep_contract import levels, log

RETRY_SECONDS = 1.0
MORE_ROOM = "raise spec.checkpoint.stagingMemory if this persists"

Then = Callable[[Fetched | None, float], Awaitable[None]]
"""Receives what was fetched, and the seconds it took."""


class Restorer:
    """Works for one epoch at a time: a newer epoch cancels the download for an older one."""

    def __init__(
        self,
        store: ObjectStore,
        folder: Path,
        memory: MemoryTier,
        on_change: Callable[[], None],
        line: logline.Log,
    ) -> None:
        self._store, self._folder, self._memory = store, folder, memory
        self._on_change, self._line = on_change, line
        self._task: asyncio.Task[None] | None = None
        self.epoch = 0
        """The newest epoch that was requested."""
        self.broken: BrokenCheckpoint | None = None
        self.error: levels.StorageError | None = None
        self.sources: Mapping[str, int] = {}
        """Tier → how many chunks of the last checkpoint came from it."""

    def ask(
        self, epoch: int, commit: log.Commit | None, nearer: Sequence[Tier], then: Then
    ) -> None:
        """`nearer`: tiers between this pod's memory and the store."""
        self.epoch = epoch
        if self._task is not None:
            self._task.cancel()
        self._task = asyncio.create_task(self._run(commit, nearer, then))

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self, commit: log.Commit | None, nearer: Sequence[Tier], then: Then) -> None:
        started = time.monotonic()
        try:
            fetched = await fetch(
                self._store, commit, self._folder, self._waits, memory=self._memory, nearer=nearer
            )
        except Broken as error:
            assert commit is not None
            self.broken = BrokenCheckpoint(manifest=commit.manifest, message=str(error))
            self._line.say("restore_failed", message=str(error))
            self._on_change()
            return
        if fetched is not None:
            self.sources = fetched.sources
            seconds = round(time.monotonic() - started, 3)
            self._line.say("fetched", step=fetched.commit.step, seconds=seconds, **self.sources)
        await then(fetched, time.monotonic() - started)

    def _waits(self, error: levels.StorageError | None) -> None:
        self.error = error
        self._on_change()


async def fetch(
    store: ObjectStore,
    commit: log.Commit | None,
    folder: Path,
    on_wait: Callable[[levels.StorageError | None], None],
    *,
    memory: MemoryTier | None = None,
    nearer: Sequence[Tier] = (),
) -> Fetched | None:
    """The verified files of `commit`; None for a start from step 0.

    `on_wait` receives the error that is waited for, and None once it has passed.

    Raises:
        Broken: this checkpoint cannot be restored, now or later.
    """
    if commit is None:
        return None
    while True:
        try:
            fetched = await fetch_checkpoint(store, commit, folder, memory=memory, nearer=nearer)
        except StoreError as error:
            # Even a denied access is no evidence against the checkpoint: falling back to an older
            # one would lose steps.
            on_wait(error.to_level())
            await asyncio.sleep(RETRY_SECONDS)
        except OSError as error:
            # Nor is a full folder: workers that still map the last checkpoint's files free space as
            # they end.
            text = f"no room for the checkpoint of step {commit.step} in {folder}: {error}"
            on_wait(levels.StorageError(kind="NoRoom", message=f"{text}; {MORE_ROOM}"))
            await asyncio.sleep(RETRY_SECONDS)
        else:
            on_wait(None)
            return fetched

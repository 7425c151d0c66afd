"""Brings the checkpoint of a new epoch into this pod's memory, however long the store takes."""

import asyncio
import errno
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from everstep_agent import logline
from everstep_agent.checkpoint.manifests import Broken
from everstep_agent.checkpoint.memory_tier import MemoryTier
from everstep_agent.checkpoint.restore import Fetched, Fetcher
from everstep_agent.checkpoint.tiers import NearTier
from everstep_agent.peers.agent_report import BrokenCheckpoint
from everstep_agent.storage.errors import StoreError
from everstep_agent.storage.store import ObjectStore
from everstep_contract import levels, log, wire
from everstep_contract.places import Place

RETRY_SECONDS = 1.0
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.ENOMEM})
MORE_ROOM = (
    "if this persists, raise spec.checkpoint.stagingMemory, or without a cluster make room there"
)
OTHER_NODE = "Everstep tries again; if this persists, cordon the node and delete the pod, so that it starts elsewhere"

T = TypeVar("T")
Then = Callable[[Fetched | None, float], Awaitable[None]]
"""Receives what was fetched, and the seconds it took."""
Waits = Callable[[levels.StorageError | None], None]
"""Receives the error that delays the work, and None once it has passed."""


class Restorer:
    """Works for one epoch at a time: a newer epoch cancels the download for an older one.

    Args:
        on_error: receives an exception that is a bug in Everstep: the epoch does not start here.
    """

    def __init__(
        self,
        store: ObjectStore,
        folder: Path,
        memory: MemoryTier,
        on_change: Callable[[], None],
        line: logline.Log,
        on_error: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self._store, self._folder, self._memory = store, folder, memory
        self._on_change, self._on_error, self._line = on_change, on_error, line
        self._tasks: set[asyncio.Task[None]] = set()
        self._fetcher = Fetcher(store, memory)
        self._fetched: Fetched | None = None
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """By digest: several workers may ask for the same chunk."""
        self._errors: dict[str, levels.StorageError] = {}
        """By what waits: the digest of a chunk, or empty for the checkpoint."""
        self.epoch = 0
        """The newest epoch that was requested."""
        self.broken: BrokenCheckpoint | None = None
        self.sources: Mapping[str, int] = {}
        """Tier → how many chunks of the last checkpoint came from it."""

    @property
    def error(self) -> levels.StorageError | None:
        """Why something waits; None: nothing does."""
        return next(iter(self._errors.values()), None)

    def ask(
        self,
        epoch: int,
        commit: log.Commit | None,
        nearer: Sequence[NearTier],
        then: Then,
        *,
        whole: bool = True,
    ) -> None:
        """
        Args:
            nearer: tiers between this pod's memory and the store.
            whole: as in `Fetcher.fetch`.
        """
        self._cancel()
        self.epoch = epoch
        self._fetcher, self._fetched = Fetcher(self._store, self._memory, nearer), None
        self._turns.clear()
        self._errors.clear()
        self._begin(self._run(commit, then, whole))

    def bring(self, asked: wire.FetchChunk, reply: Callable[[Place], None]) -> bool:
        """A worker needs a chunk that is damaged or not here: call `reply` with its place, once a
        sound copy is here. If there is none anywhere, the checkpoint is `broken`.

        Returns whether the chunk belongs to the checkpoint; if not, the request is ignored.
        """
        if self._fetched is None or asked.digest not in self._fetched.needed:
            return False
        self._begin(self._bring(self._fetched, asked, reply))
        return True

    async def close(self) -> None:
        await asyncio.gather(*self._cancel(), return_exceptions=True)

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._on_error(error)

    def _cancel(self) -> list[asyncio.Task[None]]:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        return tasks

    async def _run(self, commit: log.Commit | None, then: Then, whole: bool) -> None:
        started = time.monotonic()
        if commit is not None:
            try:
                fetched = await self._persist(
                    commit, lambda: self._fetcher.fetch(commit, self._folder, whole=whole)
                )
            except Broken as error:
                self._report_broken(commit, error)
                return
            self._fetched, self.sources = fetched, fetched.sources
            seconds = round(time.monotonic() - started, 3)
            left = len(fetched.needed) - len(fetched.places)
            later = {"later": left} if left else {}
            self._line.say("fetched", step=commit.step, seconds=seconds, **self.sources, **later)
        await then(self._fetched, time.monotonic() - started)

    async def _bring(
        self, fetched: Fetched, asked: wire.FetchChunk, reply: Callable[[Place], None]
    ) -> None:
        digest, damaged = asked.digest, asked.damaged
        async with self._turns[digest]:
            here = fetched.places.get(digest)
            named = damaged is not None and here is not None and here.is_at(damaged)
            if here is None or (named and not await self._fetcher.recheck(fetched, digest)):
                if damaged is not None:
                    self._memory.distrust(digest)
                try:
                    source = await self._persist(
                        fetched.commit, lambda: self._fetcher.add(fetched, digest), digest
                    )
                except Broken as error:
                    self._report_broken(fetched.commit, error)
                    return
                if damaged is not None:
                    self._line.say("chunk_mended", digest=digest, path=damaged.path, source=source)
            reply(fetched.places[digest])

    async def _persist(
        self, commit: log.Commit, work: Callable[[], Awaitable[T]], digest: str = ""
    ) -> T:
        what = f"the checkpoint of step {commit.step}"
        return await persist(work, what, self._folder, partial(self._waits, digest))

    def _report_broken(self, commit: log.Commit, error: Broken) -> None:
        self.broken = BrokenCheckpoint(manifest=commit.manifest, message=str(error))
        self._line.say("restore_failed", message=str(error))
        self._on_change()

    def _waits(self, digest: str, error: levels.StorageError | None) -> None:
        before = self.error
        if error is None:
            self._errors.pop(digest, None)
        else:
            self._errors[digest] = error
        if self.error != before:
            self._on_change()


async def persist(work: Callable[[], Awaitable[T]], what: str, folder: Path, on_wait: Waits) -> T:
    """The result of `work`, which is repeated until the store answers and `folder` takes it."""
    while True:
        try:
            found = await work()
        except StoreError as error:
            # Even "access denied" is no evidence against the checkpoint, and falling back to an
            # older one would lose steps.
            on_wait(error.to_level())
            await asyncio.sleep(RETRY_SECONDS)
        except OSError as error:
            # A full folder is no evidence either: workers that still map the last checkpoint's
            # files free space when they end.
            on_wait(describe_unwritten(error, what, folder))
            await asyncio.sleep(RETRY_SECONDS)
        else:
            on_wait(None)
            return found


def describe_unwritten(error: OSError, what: str, folder: Path) -> levels.StorageError:
    if error.errno in FULL:
        text = f"no room for {what} in {folder}: {error}; {MORE_ROOM}"
        return levels.StorageError(kind="NoRoom", message=text)
    text = f"{what} cannot be written to {folder}: {error}; {OTHER_NODE}"
    return levels.StorageError(kind="NotWritten", message=text)

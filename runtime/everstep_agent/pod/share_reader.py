"""Reads this pod's share of a checkpoint back from the store, never from another tier."""

import asyncio
from collections.abc import Callable, Sequence

from everstep_agent import logline
from everstep_agent.checkpoint.manifests import Broken, fetch_manifest
from everstep_agent.checkpoint.tiers import StoreTier
from everstep_agent.peers.budget import Budget
from everstep_agent.peers.epoch_level import Id
from everstep_agent.peers.read_back import ReadBack, ReadReport
from everstep_agent.storage.errors import StoreError
from everstep_agent.storage.store import ObjectStore
from everstep_contract import levels
from everstep_contract.log import Commit
from everstep_contract.manifest import Chunk
from everstep_contract.ranges import to_ranges

RETRY_SECONDS = 1.0
UPLOAD_SECONDS = 5.0
"""How long a chunk waits for uploads to pause. They may never pause, so the wait is limited."""
POLL_SECONDS = 0.1


class ShareReader:
    """
    Args:
        budget: limits how fast the share is read.
        uploads: whether this pod uploads now. Its uploads go first.
        on_news: called when the report has news that the coordinator waits for.
    """

    def __init__(
        self,
        store: ObjectStore,
        budget: Budget,
        *,
        uploads: Callable[[], bool],
        on_news: Callable[[], None],
        line: logline.Log,
    ) -> None:
        self._store, self._budget = store, budget
        self._uploads, self._on_news = uploads, on_news
        self._waits = logline.Once(line, "read_back_waits")
        self._commit: Commit | None = None
        self._chunks: Sequence[Chunk] | None = None
        """The chunks of its manifest; None: the manifest is not read yet."""
        self._share: list[int] = []
        self._read: set[int] = set()
        self._problem = ""
        self.error: levels.StorageError | None = None
        self._task: asyncio.Task[None] | None = None

    def follow(self, level: ReadBack | None, me: Id) -> None:
        """Compare the level with what was read, and read what is missing of this pod's share."""
        if level is None:
            self._stop()
            return
        if level.commit != self._commit:
            self._stop()
            self._commit, self._read, self._problem = level.commit, set(), ""
        self._share = level.list_share(me)
        if self._task is None and self._list_left() and not self._problem:
            self._task = asyncio.create_task(self._run(level.commit))

    def report(self) -> ReadReport:
        return ReadReport(
            manifest=self._commit.manifest if self._commit else "",
            read=to_ranges(self._read),
            left=len(self._list_left()),
            problem=self._problem,
        )

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._task, self._chunks, self._share, self.error = None, None, [], None

    def _list_left(self) -> list[int]:
        return [place for place in self._share if place not in self._read]

    async def _run(self, commit: Commit) -> None:
        while not self._problem and (left := self._list_left()):
            try:
                await self._read_one(commit, left[0])
            except Broken as error:
                self._problem = str(error)
            except StoreError as error:
                self.error = error.to_level()
                self._waits.say(step=commit.step, kind=error.kind, message=str(error))
                self._on_news()
                await asyncio.sleep(RETRY_SECONDS)
            else:
                self.error = None
                self._waits.passed()
        self._task = None
        self._on_news()

    async def _read_one(self, commit: Commit, place: int) -> None:
        """Raises `Broken`, `StoreError`."""
        if self._chunks is None:
            self._chunks = (await fetch_manifest(self._store, commit)).chunks
        chunk = self._chunks[place]
        await self._let_uploads_pass()
        await self._budget.take(chunk.bytes)
        await StoreTier(self._store).check(chunk)
        self._read.add(place)

    async def _let_uploads_pass(self) -> None:
        polls = round(UPLOAD_SECONDS / POLL_SECONDS)
        for _ in range(polls if self._uploads() else 0):
            await asyncio.sleep(POLL_SECONDS)
            if not self._uploads():
                return

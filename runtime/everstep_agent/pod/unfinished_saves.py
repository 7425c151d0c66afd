"""Saves that agents of this job had staged but not uploaded when they ended, and that this pod can
finish.

These are the saves of its agent's predecessor, and those of which this pod's memory or its node's
disk holds copies. If this agent was alive when an epoch was cut, its own saves are still in its
queue, so only the copies of other pods' saves count.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from everstep_agent.checkpoint.chunking import BadStaging
from everstep_agent.checkpoint.folder_tier import FolderTier
from everstep_agent.checkpoint.unsent import Unsent, read_copied, read_unsent, rebuild
from everstep_agent.peers.agent_report import UnsentSave
from everstep_agent.peers.epoch_level import EpochLevel
from everstep_agent.pod.save_queue import WAITING, Uploads

Found = tuple[Unsent, FolderTier | None]
"""A save, and the tier that holds its copy; None: its staged file is here."""


class UnfinishedSaves:
    """
    Args:
        staging: the folder of the staged files.
        tiers: tiers that may hold copies of them.
        job: UID of the job. Saves of a former job are not finished.
    """

    def __init__(self, staging: Path, tiers: Sequence[FolderTier], job: str) -> None:
        self._staging, self._tiers, self._job = staging, tiers, job
        self._found: tuple[Found, ...] = ()
        self._tasks: set[asyncio.Task[None]] = set()
        self._looks_for = 0
        self._uploaded = (0, 0)
        """Epoch and kept step of the last level that was given to `upload`."""
        self.known = 0
        """The cut epoch whose copies `list` contains; 0: none."""

    async def find(self) -> None:
        near = await asyncio.to_thread(read_unsent, self._staging)
        own = (unsent for unsent in near if unsent.is_of(self._job))
        self._found = choose_unsent(own, await self._read_copies())

    def look_for(self, epoch: int, on_known: Callable[[], None]) -> None:
        """Find the copies of other pods' saves of an epoch that is cut, once per epoch."""
        if epoch != self._looks_for:
            self._looks_for = epoch
            self._begin(self._look_for(epoch, on_known))

    async def _look_for(self, epoch: int, on_known: Callable[[], None]) -> None:
        here = choose_unsent((), await self._read_copies())
        self._found = tuple(found for found in here if found[0].staged.epoch == epoch)
        self.known = epoch
        on_known()

    async def _read_copies(self) -> Sequence[tuple[Unsent, FolderTier]]:
        copied = [(unsent, tier) for tier in self._tiers for unsent in await _read(tier)]
        return [(unsent, tier) for unsent, tier in copied if unsent.is_of(self._job)]

    def list(self) -> tuple[UnsentSave, ...]:
        return tuple(to_report(unsent) for unsent, _ in self._found)

    def upload(self, level: EpochLevel, uploads: Uploads, is_wanted: Callable[[], bool]) -> None:
        """Upload the saves of this epoch that are not committed, as long as they are wanted.

        A copy that cannot be used is no longer in `list`. Does nothing if it was called with the
        same epoch and kept step before.
        """
        if (level.number, level.kept) == self._uploaded:
            return
        self._uploaded = level.number, level.kept
        self._begin(self._upload(choose_open(self._found, level), uploads, is_wanted))

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _upload(
        self, chosen: Sequence[Found], uploads: Uploads, is_wanted: Callable[[], bool]
    ) -> None:
        for unsent, tier in chosen:
            if tier is not None and to_report(unsent) in uploads.list_unsent():
                continue
            try:
                whole = await self._bring(unsent, tier)
            except (BadStaging, OSError) as error:
                # Its owner, or another pod with a copy, may be uploading it.
                self._found = tuple(found for found in self._found if found[0] != unsent)
                uploads.note_unusable(unsent.staged, unsent.rank, str(error))
                continue
            if not is_wanted():
                if tier is not None:
                    await asyncio.to_thread(Path(whole.staged.path).unlink, missing_ok=True)
                return
            uploads.book.add(whole.entries)
            uploads.add(replace(whole.staged, near=False), whole.rank)

    async def _bring(self, unsent: Unsent, tier: FolderTier | None) -> Unsent:
        """The save with its staged file, which is rebuilt from the copy if there is none here.

        Raises as `rebuild`.
        """
        if tier is None:
            return unsent
        path = self._staging / choose_name(unsent)
        try:
            return await tier.run(unsent.bytes, rebuild, unsent, tier, path)
        except (BadStaging, OSError):
            path.unlink(missing_ok=True)
            raise


async def _read(tier: FolderTier) -> tuple[Unsent, ...]:
    with contextlib.suppress(OSError):  # then its copies cannot be used
        return await tier.run(0, read_copied, tier)
    return ()


def choose_unsent(
    near: Iterable[Unsent], copied: Sequence[tuple[Unsent, FolderTier]]
) -> tuple[Found, ...]:
    """Each save of a rank once, from the nearest place."""
    found: dict[tuple[int, int, int, bool], Found] = {u.key: (u, t) for u, t in reversed(copied)}
    found |= {unsent.key: (unsent, None) for unsent in near}
    return tuple(found.values())


def choose_open(found: Iterable[Found], level: EpochLevel) -> list[Found]:
    """The saves of this epoch that are newer than its newest commit.

    If the level names a kept step, only saves of that step. Of each rank only the newest saves, as
    many as may wait for the store, the oldest of them first.
    """
    staged: dict[int, list[Found]] = {}
    for each in sorted(found, key=lambda f: (f[0].staged.step, not f[0].staged.whole)):
        unsent, step = each[0], each[0].staged.step
        wanted = step > level.committed and level.kept in (0, step)
        if unsent.staged.epoch == level.number and wanted:
            staged.setdefault(unsent.rank, []).append(each)
    return [each for of_rank in staged.values() for each in of_rank[-WAITING:]]


def choose_name(unsent: Unsent) -> str:
    """The name of a staged file that is rebuilt from a copy.

    It is unique to the save, because a predecessor of the agent may have left other files here.
    """
    staged = unsent.staged
    kind = "whole" if staged.whole else "part"
    return f"copied-{staged.epoch}-{staged.step}-{unsent.rank}.{kind}"


def to_report(unsent: Unsent) -> UnsentSave:
    staged = unsent.staged
    return UnsentSave(epoch=staged.epoch, step=staged.step, rank=unsent.rank, whole=staged.whole)

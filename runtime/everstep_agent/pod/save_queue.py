"""The agent's part of a save: uploads staged files one after the other, and keeps their parts until
they are committed.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace

from everstep_agent import logline
from everstep_agent.checkpoint.chunk_upload import Uploader
from everstep_agent.checkpoint.chunking import BadStaging
from everstep_agent.checkpoint.ledger import Book
from everstep_agent.checkpoint.memory_tier import MemoryTier
from everstep_agent.checkpoint.parts import Part, replaces
from everstep_agent.storage.errors import StoreError
from everstep_agent.storage.store import ObjectStore
from everstep_contract import levels, wire

RETRY_SECONDS = 1.0
WAITING = 2
"""How many staged saves of one rank may wait in memory; beyond that the oldest is dropped."""


GIVEN_UP = 4
"""How many saves without this rank's part are reported to the coordinator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    staged: wire.Staged
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    on_part: Callable[[Part], None]
    on_failed: Callable[[wire.Staged, int], None]
    """Receives a staged save that cannot be read, and its rank."""


class Uploads:
    """One per epoch: keys are (epoch, step), void once the epoch's claim is no longer the newest."""

    def __init__(
        self,
        store: ObjectStore,
        token: str,
        book: Book,
        memory: MemoryTier,
        listener: Listener,
        line: logline.Log,
    ) -> None:
        self._uploader = Uploader(store, token)
        self._memory = memory
        self._book = book
        self._listener = listener
        self._line = line
        self._waits = logline.Once(line, "upload_waits")
        self._waiting: list[Job] = []
        self._wake = asyncio.Event()
        self._task = asyncio.create_task(self._run())
        self.parts: dict[tuple[int, int, int], Part] = {}
        """Uploaded and not committed, by (epoch, step, rank): sent again to a new coordinator."""
        self._layouts: dict[int, tuple[str, str]] = {}
        """Rank → digest and layout that its worker sent last; each is sent only once."""
        self.error: levels.StorageError | None = None

    def add(self, staged: wire.Staged, rank: int) -> None:
        if staged.packed:
            self._layouts[rank] = staged.layout, staged.packed
        digest, packed = self._layouts.get(rank, ("", ""))
        if digest == staged.layout:
            staged = replace(staged, packed=packed)
        self._memory.release_others(staged.step)
        self._waiting.append(Job(staged=staged, rank=rank))
        mine = [j for j in self._waiting if j.rank == rank and not j.staged.whole]
        for job in mine[:-WAITING]:
            self._drop(job)
            self.give_up(job.staged, rank, "two newer saves wait for the store")
        self._wake.set()

    def committed(self, epoch: int, step: int) -> None:
        self._uploader.committed(epoch, step)
        self._book.committed(step)
        self.parts = {k: v for k, v in self.parts.items() if k[1] > step}
        for job in [j for j in self._waiting if j.staged.step <= step]:
            self._waiting.remove(job)
            _remove(job.staged.path)

    def retire(self) -> None:
        """The epoch is over: what waits is dropped."""
        self._task.cancel()
        for job in self._waiting:
            _remove(job.staged.path)
        self._waiting.clear()
        self.parts.clear()

    async def close(self) -> None:
        self.retire()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            while not self._waiting:
                self._wake.clear()
                await self._wake.wait()
            # All ranks wait for a post-mortem save.
            job = next((j for j in self._waiting if j.staged.whole), self._waiting[0])
            await self._upload(job)

    async def _upload(self, job: Job) -> None:
        staged = job.staged
        if any(key[:2] == (staged.epoch, staged.step) for key in self.parts):
            # An earlier upload for this step failed, perhaps because a chunk of an older save was
            # retired in the meantime.
            self._uploader.forget()
        try:
            found = await self._uploader.upload(staged, job.rank, self._book.upto(staged.step))
        except StoreError as error:
            self.error = error.to_level()
            self._waits.say(step=staged.step, kind=error.kind, message=str(error))
            await asyncio.sleep(RETRY_SECONDS)
            return
        except (BadStaging, OSError) as error:
            self._drop(job)
            self.give_up(staged, job.rank, str(error))
            return
        self.error, part = None, found.part
        self._waits.passed()
        if job in self._waiting:  # else it was dropped meanwhile, and its file is gone
            self._waiting.remove(job)
            self._memory.hold(staged.step, staged.path, found.places)
        self._line.say("uploaded", step=part.step, rank=part.rank, bytes=part.bytes)
        self._keep(part)

    def give_up(self, staged: wire.Staged, rank: int, problem: str) -> None:
        """Reports that this part will never come."""
        key = (staged.epoch, staged.step, rank)
        if key not in self.parts:
            self._line.say("save_dropped", step=staged.step, rank=rank, message=problem)
        if not staged.path:  # there was no room for a copy
            self._memory.release_others(staged.step)
        self._listener.on_failed(staged, rank)
        if not staged.whole:
            self._keep(
                Part(
                    epoch=staged.epoch,
                    step=staged.step,
                    rank=rank,
                    pins=staged.pins,
                    problem=problem,
                )
            )
            old = [k for k, p in self.parts.items() if p.problem and k[2] == rank]
            for key in old[:-GIVEN_UP]:
                del self.parts[key]

    def _keep(self, part: Part) -> None:
        key = part.epoch, part.step, part.rank
        if replaces(part, self.parts.get(key)):
            self.parts[key] = part
            self._listener.on_part(part)

    def _drop(self, job: Job) -> None:
        if job in self._waiting:
            self._waiting.remove(job)
        _remove(job.staged.path)


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)

"""The agent's part in a save: it uploads staged files one after the other, and keeps their parts
until they are committed. A near save is kept as it is, and is uploaded only on request.
"""

import asyncio
import os
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace

from everstep_agent import logline
from everstep_agent.checkpoint.chunk_upload import Uploader
from everstep_agent.checkpoint.chunking import BadStaging
from everstep_agent.checkpoint.cutting import Cut, cut_file
from everstep_agent.checkpoint.ledger import Book
from everstep_agent.checkpoint.memory_tier import Held, MemoryTier
from everstep_agent.checkpoint.parts import Part, PartKey
from everstep_agent.checkpoint.unsent import Unsent, write_unsent
from everstep_agent.peers.agent_report import UnsentSave
from everstep_agent.storage.errors import StoreError
from everstep_contract import levels, wire
from everstep_contract.places import Place

RETRY_SECONDS = 1.0
WAITING = 2
"""How many staged saves of one rank may wait in memory. Beyond that, the oldest is dropped."""


GIVEN_UP = 4
"""For each rank, how many saves that cannot be committed because of its part are reported to the coordinator:
it has failed, or holds NaN or infinite values.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    staged: wire.Staged
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    on_part: Callable[[Part], None]
    on_failed: Callable[[wire.Staged, int], None]
    """Receives a save that was given up, and its rank."""
    on_held: Callable[[], None]
    """Called when `list_held` may have changed."""


class Uploads:
    """The uploads of one epoch. They are void once the epoch's claim is no longer the newest.

    Args:
        job: UID of the job.
    """

    def __init__(
        self,
        uploader: Uploader,
        job: str,
        book: Book,
        memory: MemoryTier,
        listener: Listener,
        line: logline.Log,
    ) -> None:
        self._uploader, self._job = uploader, job
        self._memory = memory
        self.book = book
        self._listener = listener
        self._line = line
        self._waits = logline.Once(line, "upload_waits")
        self._waiting: list[Job] = []
        self._cuts: dict[str, list[Cut]] = {}
        """Path of a waiting file → its chunks."""
        self._kept = 0
        """As `EpochLevel.kept`."""
        self._asked = 0
        """Step of the near save that is to be uploaded; 0: none."""
        self._backlog = 0
        """As `EpochLevel.backlog`."""
        self._sending: Job | None = None
        """The job that is being uploaded."""
        self._hurried = False
        """Saves may be staged faster than they are committed, so the next one gets the memory of older
        saves that do not wait for their upload.
        """
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[object]] = {asyncio.create_task(self._run())}
        self.parts: dict[PartKey, Part] = {}
        """The parts that are uploaded and not committed. A new coordinator receives them again."""
        self._layouts: dict[int, tuple[str, str]] = {}
        """Rank → the last digest and layout from its worker, which sends each layout once in an epoch."""
        self.error: levels.StorageError | None = None

    @property
    def busy(self) -> bool:
        """Whether there is something to upload."""
        return any(self._is_due(job) for job in self._waiting)

    def _is_due(self, job: Job) -> bool:
        return not job.staged.near or job.staged.step == self._asked

    def list_held(self, ranks: int) -> tuple[int, ...]:
        """Steps for which the parts of at least `ranks` local ranks are here, or are uploaded and
        not committed.
        """
        found: dict[int, set[int]] = {}
        for unsent in self.list_unsent():
            if not unsent.whole:
                found.setdefault(unsent.step, set()).add(unsent.rank)
        return tuple(sorted(step for step, held in found.items() if len(held) >= ranks))

    def list_unsent(self) -> tuple[UnsentSave, ...]:
        """The saves that are here, and those that are uploaded and not committed."""
        here = {
            _name(j.staged.epoch, j.staged.step, j.rank, j.staged.whole)
            for j in self._waiting
            if j.staged.path in self._cuts
        }
        sent = {_name(*p.key) for p in self.parts.values() if not p.problem}
        return tuple(here | sent)

    def keep(self, step: int) -> None:
        """All members hold their parts of this step: drop the older near saves."""
        if step <= self._kept:
            return
        self._kept = self._memory.kept = step
        for job in [j for j in self._waiting if j.staged.near and j.staged.step < step]:
            self._drop(job)
        self._memory.release_before(step, self.list_paths())

    def ask(self, step: int) -> None:
        """Upload the near save of this step."""
        self._asked = step
        self._wake.set()

    def hold_after(self, backlog: int) -> None:
        """Keep saves after this step here while older ones cannot be committed; 0: upload all."""
        if backlog != self._backlog:
            self._backlog = backlog
            self._wake.set()

    def hurry(self) -> None:
        """Until the next commit, each save gets the memory of older ones. A save may stay incomplete: other ranks
        may have staged it in the former epoch.
        """
        self._hurried = True

    def add(self, staged: wire.Staged, rank: int) -> None:
        if staged.packed:
            self._layouts[rank] = staged.layout, staged.packed
        digest, packed = self._layouts.get(rank, ("", ""))
        if digest == staged.layout:
            staged = replace(staged, packed=packed)
        if self._hurried:
            self._memory.release_before(staged.step, self.list_paths())
        if self._is_again(staged, rank):
            # Perhaps because a chunk of an older save was retired in the meantime.
            self._uploader.forget()
        job = Job(staged=staged, rank=rank)
        self._waiting.append(job)
        excess = max(0, len(self._list_parts(rank, near=False)) - WAITING)
        for old in self._list_idle_parts(rank)[:-1][:excess]:  # never the new one
            self._drop(old)
            self.give_up(old.staged, rank, "two other saves wait for the store")
        for old in self._list_parts(rank, near=True)[:-1]:
            if old.staged.step != self._kept:
                self._drop(old)
        self._begin(self._cut(job))

    def _begin(self, work: Coroutine[None, None, object]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _is_again(self, staged: wire.Staged, rank: int) -> bool:
        """Whether this rank's part of the step, or any part if the save is whole, was uploaded before."""
        place = (staged.epoch, staged.step)
        return any(k[:3] == (*place, rank) or (staged.whole and k[:2] == place) for k in self.parts)

    def _list_parts(self, rank: int, *, near: bool) -> list[Job]:
        return [
            j
            for j in self._waiting
            if j.rank == rank and j.staged.near == near and not j.staged.whole
        ]

    def _list_idle_parts(self, rank: int) -> list[Job]:
        """All but the one that is being uploaded. If that one were dropped for a newer save, a slow
        store would never receive a complete save.
        """
        return [j for j in self._list_parts(rank, near=False) if j is not self._sending]

    def committed(self, epoch: int, step: int) -> None:
        self._uploader.committed(epoch, step)
        self.book.committed(step)
        self.parts = {k: v for k, v in self.parts.items() if k[1] > step}
        for job in [j for j in self._waiting if j.staged.step <= step]:
            self._drop(job)
        self._memory.note_commit(step, self.list_paths())
        self._hurried = self._hurried and bool(self._waiting)

    def verified(self, epoch: int, step: int) -> None:
        self._uploader.verified(epoch, step)

    def retire(self) -> None:
        """The epoch is over: drop what waits."""
        for task in self._tasks:
            task.cancel()
        for job in list(self._waiting):
            self._drop(job)
        self.parts.clear()

    async def close(self) -> None:
        tasks = list(self._tasks)
        self.retire()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def stop(self) -> None:
        """This agent ends: leave what waits to its successor."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _cut(self, job: Job) -> None:
        """Divide the staged file into chunks. From then on they can be copied and uploaded, and the
        agent's successor finds them.
        """
        staged = job.staged
        try:
            cuts = await cut_file(staged)
            self._check_unchanged(staged.path, cuts)
            record = await self._record(job, cuts)
        except Exception as error:  # else the job would wait for this part without end
            self._drop(job)
            self.give_up(staged, job.rank, _describe(error))
            return
        if job not in self._waiting:  # dropped meanwhile
            self._memory.release(staged.path)
            return
        self._cuts[staged.path] = cuts
        self._memory.hold(
            Held(
                epoch=staged.epoch,
                step=staged.step,
                chunks={cut.digest: cut.place for cut in cuts} | record,
                unsent=next(iter(record), ""),
            ),
            staged.path,
        )
        self._wake.set()
        self._listener.on_held()

    async def _record(self, job: Job, cuts: list[Cut]) -> dict[str, Place]:
        """Write what another agent needs to finish this upload, as a chunk.

        Empty: the save was dropped, or there is no room for the chunk.
        """
        staged = job.staged
        if job not in self._waiting:
            return {}
        try:
            unsent = Unsent(
                staged=staged,
                rank=job.rank,
                entries=tuple(self.book.upto(staged.step)) if staged.lead else (),
                bytes=os.path.getsize(staged.path),  # noqa: ASYNC240 a file in memory
                chunks=tuple(cut.digest for cut in cuts),
                job=self._job,
            )
            return await asyncio.to_thread(write_unsent, unsent)
        except OSError:
            return {}

    def _check_unchanged(self, path: str, cuts: list[Cut]) -> None:
        """Check that a file of the agent's predecessor has the digests that were noted for it.

        Raises `BadStaging`.
        """
        noted = self._memory.list_digests(path)
        if noted is not None and noted != {cut.digest for cut in cuts}:
            raise BadStaging(f"{path} is not what was staged")

    async def _run(self) -> None:
        while True:
            while not (ready := self._list_ready()):
                self._wake.clear()
                await self._wake.wait()
            # A post-mortem save goes first, because all ranks wait for it.
            self._sending = next((j for j in ready if j.staged.whole), ready[0])
            try:
                await self._upload(self._sending)
            finally:
                self._sending = None

    def _list_ready(self) -> list[Job]:
        return [
            j
            for j in self._waiting
            if j.staged.path in self._cuts and self._is_due(j) and not self._must_wait(j.staged)
        ]

    def _must_wait(self, staged: wire.Staged) -> bool:
        """Whether older complete saves have to be committed first. The whole job waits for the other kinds."""
        awaited = staged.whole or staged.step == self._asked
        return 0 < self._backlog < staged.step and not awaited

    async def _upload(self, job: Job) -> None:
        staged = job.staged
        try:
            part = await self._uploader.upload(
                staged, job.rank, self.book.upto(staged.step), self._cuts[staged.path]
            )
        except StoreError as error:
            if job not in self._waiting:
                self._uploader.disown(staged.epoch, staged.step)
            self.error = error.to_level()
            self._waits.say(step=staged.step, kind=error.kind, message=str(error))
            await asyncio.sleep(RETRY_SECONDS)
            return
        except Exception as error:  # else the job would wait for this part without end
            self._uploader.disown(staged.epoch, staged.step)
            if job in self._waiting:  # else it was dropped meanwhile, and its file is gone
                self._drop(job)
                self.give_up(staged, job.rank, _describe(error))
            return
        self.error = None
        self._waits.passed()
        if job not in self._waiting:  # dropped meanwhile: its memory may hold the next save
            self._uploader.disown(staged.epoch, staged.step)
            return
        self._waiting.remove(job)
        del self._cuts[staged.path]
        if not part.not_finite:
            self._line.say("uploaded", step=part.step, rank=part.rank, bytes=part.bytes)
        self._keep(part)

    def note_unusable(self, staged: wire.Staged, rank: int, problem: str) -> None:
        """Report that this pod's copy of a save cannot be uploaded. Others may hold the save, too."""
        self._line.say("copy_unusable", step=staged.step, rank=rank, message=problem)
        self._listener.on_held()

    def give_up(self, staged: wire.Staged, rank: int, problem: str) -> None:
        """Report that this part will never come."""
        if (staged.epoch, staged.step, rank, staged.whole) not in self.parts:
            self._line.say("save_dropped", step=staged.step, rank=rank, message=problem)
        if staged.near and staged.step != self._asked:
            return  # the near save before it is still here
        if staged.full:
            self._make_room()
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

    def yield_room(self, rank: int) -> bool:
        """Make room for a save of this rank that will be tried again and that no save follows.

        Drops a save that does not wait for the store or, if there is none, the older of two saves
        of this rank that do. Returns whether it dropped one.
        """
        if self._memory.release_oldest(self.list_paths()) or self._drop_near():
            return True
        if len(self._list_parts(rank, near=False)) < WAITING:
            return False
        old = self._list_idle_parts(rank)[0]
        self._drop(old)
        self.give_up(old.staged, rank, "the last save takes its room")
        return True

    async def make_room_for_whole(self, rank: int) -> bool:
        """Make room for the full state, which supersedes all that is here. Returns whether
        something was dropped.
        """
        dropped = self.yield_room(rank) or await self._memory.drop_others()
        await self._memory.freed()
        return dropped

    def _keep(self, part: Part) -> None:
        self.parts[part.key] = part
        lost = [
            k for k, p in self.parts.items() if k[2] == part.rank and (p.problem or p.not_finite)
        ]
        for key in lost[:-GIVEN_UP]:
            del self.parts[key]
        self._listener.on_part(part)

    def _drop(self, job: Job) -> None:
        if job in self._waiting:
            self._waiting.remove(job)
        self._cuts.pop(job.staged.path, None)
        self._memory.release(job.staged.path)

    def _make_room(self) -> None:
        """Make room for the next save: drop the oldest save that does not wait for the store or, if
        no save is left here, the copies of other pods' saves.
        """
        waiting = self.list_paths()
        self._hurried = True
        if self._memory.release_oldest(waiting) or self._drop_near():
            return
        if not waiting:
            self._begin(self._memory.drop_others())

    def _drop_near(self) -> bool:
        """Drop the oldest near save. Returns whether there was one."""
        near = [j for j in self._waiting if j.staged.near]
        oldest = min((j.staged.step for j in near), default=0)
        for job in [j for j in near if j.staged.step == oldest]:
            self._drop(job)
        return bool(near)

    def list_paths(self) -> set[str]:
        """The paths of the staged files that wait."""
        return {job.staged.path for job in self._waiting}


def _describe(error: Exception) -> str:
    if isinstance(error, (BadStaging, OSError)):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _name(epoch: int, step: int, rank: int, whole: bool) -> UnsentSave:
    return UnsentSave(epoch=epoch, step=step, rank=rank, whole=whole)

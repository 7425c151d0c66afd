"""The saves of this pod's workers from staging on, and those that the agent's predecessor had not
uploaded when it ended.
"""

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from everstep_agent.checkpoint.chunk_upload import Uploader
from everstep_agent.checkpoint.files import delete_beside
from everstep_agent.checkpoint.ledger import Book
from everstep_agent.checkpoint.parts import Part, PartKey
from everstep_agent.context import Context
from everstep_agent.peers.agent_report import State, UnsentSave
from everstep_agent.peers.epoch_level import EpochLevel
from everstep_agent.pod.save_queue import Listener, Uploads
from everstep_agent.pod.unfinished_saves import UnfinishedSaves
from everstep_agent.pod.worker import Worker
from everstep_contract import levels, wire


class PodSaves:
    """
    Args:
        listener: is called with each part, and with each save that is lost.
        on_news: called when the coordinator needs a new report.
    """

    def __init__(
        self, context: Context, book: Book, listener: Listener, on_news: Callable[[], None]
    ) -> None:
        self._context, self._book = context, book
        self._listener, self._on_news = listener, on_news
        copies = (context.memory.others, *([context.disk] if context.disk else []))
        self._staging = Path(context.settings.memory) / "staging"
        self._unfinished = UnfinishedSaves(self._staging, copies, context.settings.job_uid)
        self._epoch = 0
        self.uploads: Uploads | None = None
        """The uploads of the present epoch. Before the agent's first epoch: those of the former
        epoch whose saves it finishes.
        """
        self.pins: dict[str, int] = {}
        """Pins that the script has requested → their steps, until they are committed. Kept here,
        because the save that carries them may be dropped.
        """
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        await self._unfinished.find()

    async def close(self) -> None:
        await self._unfinished.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.uploads is not None:
            await self.uploads.stop()

    # --- epochs ----------------------------------------------------------------------------------

    def enter(self, epoch: int, token: str) -> None:
        """The local workers enter this epoch. What they staged before is no longer uploaded."""
        self._epoch = epoch
        if self.uploads is not None:
            self.uploads.retire()
        self.uploads = self._open_uploads(token)

    def continue_in(self, level: EpochLevel) -> None:
        """The local workers continue in this epoch. What is not committed never will be, so it must not take the
        room of later saves.
        """
        started = level.commit.step if level.commit else 0
        memory = self._context.memory
        self.enter(level.number, level.token)
        if self.uploads is not None:
            self.uploads.hurry()
        memory.release_after(max(started, level.committed, memory.committed))

    async def end(self) -> None:
        """Cancel the uploads, before the next epoch's workers start."""
        if self.uploads is not None:
            await self.uploads.close()

    def follow(self, level: EpochLevel, good: levels.CheckpointRef | None) -> None:
        """Apply the present epoch's level.

        Args:
            good: the newest checkpoint that was read back.
        """
        if self.uploads is not None:
            if level.committed > level.resume:
                self.uploads.committed(level.number, level.committed)
            if good is not None:
                self.uploads.verified(good.epoch, good.step)
            self.uploads.keep(level.kept)
            self.uploads.hold_after(level.backlog)
        self.pins = {name: step for name, step in self.pins.items() if step > level.committed}

    def look_for_copies(self, epoch: int) -> None:
        """Look for copies of other pods' saves of an epoch that is cut."""
        self._unfinished.look_for(epoch, self._on_news)

    def finish(self, level: EpochLevel | None) -> None:
        """Upload what was staged in that epoch and can be finished here."""
        if level is None or self._epoch not in (0, level.number):
            return
        if self.uploads is None:
            self.uploads = self._open_uploads(level.token)
        uploads = self.uploads
        uploads.ask(level.kept)
        self._unfinished.upload(level, uploads, lambda: self.uploads is uploads)

    def _open_uploads(self, token: str) -> Uploads:
        context = self._context
        uploader, job = Uploader(context.store, token), context.settings.job_uid
        return Uploads(uploader, job, self._book, context.memory, self._listener, context.line)

    # --- workers ---------------------------------------------------------------------------------

    def take(self, worker: Worker, frame: wire.Staged, level: EpochLevel | None) -> None:
        """A worker has staged a save, or has failed to."""
        self.pins = dict.fromkeys(frame.pins, frame.step) | self.pins
        if frame.whole:
            worker.saving_since = None
        if frame.problem:
            self._give_up(worker, frame, level)
            return
        # The last save is staged again in each epoch that continues in place, even if it is committed by then.
        again = level is not None and not frame.whole and frame.step <= level.committed
        if self.uploads is None or frame.epoch != self._epoch or again:
            os.unlink(frame.path)
            return
        if frame.whole:
            worker.whole = frame.step
        elif not frame.near:
            worker.staged = max(worker.staged, frame.step)
        self._context.line.say(
            "staged",
            step=frame.step,
            rank=worker.rank,
            whole=frame.whole or None,
            near=frame.near or None,
            ms=round(frame.ms),
        )
        self.uploads.add(frame, worker.rank)

    def clear(self, pid: int) -> None:
        """A worker has ended: delete what it staged without a word to the agent, because it was
        killed in between.
        """
        known = self._context.memory.list_paths()
        if self.uploads is not None:
            known |= self.uploads.list_paths()
        staged = self._staging.glob(f"*-{pid}-????????.part")  # as the worker names them
        delete_beside(path for path in staged if str(path) not in known)

    def _give_up(self, worker: Worker, frame: wire.Staged, level: EpochLevel | None) -> None:
        if self.uploads is None or frame.epoch != self._epoch:
            return
        again = frame.full and _is_tried_again(worker, frame, level)
        if again and self.uploads.yield_room(worker.rank):
            return
        if frame.full and frame.whole:
            task = asyncio.create_task(self._make_room(self.uploads, worker, frame))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return
        self.uploads.give_up(frame, worker.rank, frame.problem)

    async def _make_room(self, uploads: Uploads, worker: Worker, frame: wire.Staged) -> None:
        """Make room for the full state, and order it again; if there is nothing to drop, give it up."""
        made = await uploads.make_room_for_whole(worker.rank)
        if self.uploads is not uploads or not worker.alive:
            return
        if made:
            self._order_again(worker, frame)
        else:
            uploads.give_up(frame, worker.rank, frame.problem)

    def _order_again(self, worker: Worker, frame: wire.Staged) -> None:
        held = worker.state is State.HELD
        order = wire.SaveHeld if held else wire.Save
        self._context.line.say(
            "save_again", step=frame.step, rank=worker.rank, message=frame.problem
        )
        if not held:
            worker.saving_since = time.monotonic()
        worker.send(order(epoch=frame.epoch, step=frame.step))

    # --- report ----------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether there is something to upload."""
        return self.uploads is not None and self.uploads.busy

    @property
    def parts(self) -> Mapping[PartKey, Part]:
        """The parts that are uploaded and not committed."""
        return self.uploads.parts if self.uploads else {}

    @property
    def error(self) -> levels.StorageError | None:
        return self.uploads.error if self.uploads else None

    @property
    def known(self) -> int:
        """The cut epoch for which `list_unsent` includes copies of other pods' saves; 0: none."""
        return self._unfinished.known

    def list_held(self, ranks: int) -> tuple[int, ...]:
        """Steps for which the parts of at least `ranks` local ranks are here, or are uploaded and
        not committed.
        """
        return self.uploads.list_held(ranks) if self.uploads and ranks else ()

    def list_unsent(self) -> tuple[UnsentSave, ...]:
        if self._epoch == 0:
            return self._unfinished.list()
        if self.uploads is None or self._unfinished.known != self._epoch:
            return ()
        return (*self.uploads.list_unsent(), *self._unfinished.list())


def _is_tried_again(worker: Worker, frame: wire.Staged, level: EpochLevel | None) -> bool:
    """Whether the worker will try this save again. It does so with the last save of the training,
    and with a save before it leaves.
    """
    boundary = level.boundary if level else None
    stays = boundary is not None and boundary.stay and boundary.step <= frame.step
    ends = worker.tracked is not None and worker.tracked.until == frame.step
    return not frame.whole and (stays or ends)

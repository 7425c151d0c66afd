"""One pod's part in the job: compares the coordinator's levels with its own workers and acts on the
difference.

`apply` may be called at any time, with any levels, again and again: it looks at where the workers
are and does what is missing.
"""

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from everstep_agent import hang, logline, spawn
from everstep_agent.arming import Arming, order_save
from everstep_agent.checkpoint.ledger import Book
from everstep_agent.checkpoint.parts import Part
from everstep_agent.checkpoint.restore import Fetched
from everstep_agent.desk import Identity
from everstep_agent.messages import (
    AgentReport,
    EpochLevel,
    EpochMember,
    FailureReport,
    Levels,
    Stage,
    State,
)
from everstep_agent.relay import STORE_FRAMES, Relay
from everstep_agent.reporting import (
    build_exit_failure,
    build_failure,
    build_worker_report,
    find_unheard_of,
)
from everstep_agent.restoring import Restorer
from everstep_agent.starting import build_start, is_fresh_wanted
from everstep_agent.storage.retrying import Retrying
from everstep_agent.timeledger import TimeLedger
from everstep_agent.uploads import Uploads
from everstep_agent.workers import Worker, WorkerSet
from everstep_contract import env, levels, position, report, wire

EARLY_DEATHS = 3


class Pod:
    """`changed` is set whenever the report says something new; `on_part` gets every uploaded part;
    `former` is where the workers of the container's last life stood.
    """

    def __init__(
        self,
        *,
        settings: env.AgentEnv,
        me: Identity,
        store: Retrying,
        spawner: spawn.Spawner,
        environ: Mapping[str, str],
        relay: Relay,
        on_part: Callable[[Part], None],
        line: logline.Log,
        former: position.Position | None = None,
    ) -> None:
        self.settings = settings
        self._former = former or position.Position()
        self.me = me
        self.store = store
        self.line = line
        self.changed = asyncio.Event()
        self.leaving = False
        self.quiet = False
        """No more fresh workers: this pod leaves, or the job ends."""
        self.failure: FailureReport | None = None
        """Ends the job: the script cannot be run anywhere."""
        self.fatal: FailureReport | None = None
        """Ends this container only: another one may do better."""
        self.early_deaths = 0
        self.epoch = 0
        self.joined = 0
        self._cut_heard = 0
        self.level: EpochLevel | None = None
        """Of the epoch that our workers are in."""
        self._newest: Levels | None = None
        self._restorer = Restorer(store, Path(settings.memory) / "restore", self._touch, line)
        self._arming = Arming()
        self._book = Book()
        self.uploads: Uploads | None = None
        self._relay = relay
        self._on_part = on_part
        self._ledger = TimeLedger()
        self._notes: tuple[str, ...] = ()
        self.workers = WorkerSet(
            spawner=spawner,
            count=settings.workers,
            memory=settings.memory,
            environ=environ,
            on_frame=self._frame,
            on_death=self._death,
            log=line,
        )

    async def open(self) -> None:
        for name in ("staging", "restore"):
            os.makedirs(os.path.join(self.settings.memory, name), exist_ok=True)
        await self.workers.open()
        for local in range(self.settings.workers):
            self._ledger.rest(local, time.monotonic())
        self.workers.ensure_fresh()

    async def close(self) -> None:
        await self._restorer.close()
        if self.uploads is not None:
            await self.uploads.close()
        await self.workers.close()

    # --- levels ----------------------------------------------------------------------------------

    def apply(self, published: Levels) -> None:
        self._newest = published
        level = published.epoch
        if level is not None and not level.live:
            self._cut_heard = max(self._cut_heard, level.number)
        self._apply_to_current(published)
        if self._wants_fresh(published):
            self.workers.ensure_fresh()
        self._join(published)
        self._begin(published)

    def _apply_to_current(self, published: Levels) -> None:
        level = published.epoch
        if self.epoch == 0:
            return
        # A round alone ends nothing: whoever gathers it may not have heard of our epoch yet, and what
        # we hold may stand nowhere else.
        known = level.number if level else 0
        if max(known, published.claimed if known < self.epoch else 0) > self.epoch:
            if not self.workers.group_over():
                self._cut()
                self.workers.end_current()
            return
        if level is None or level.number < self.epoch:
            return
        self.level, current = level, list(self.workers.current.values())
        if self.uploads is not None and level.committed > level.resume:
            self.uploads.committed(level.number, level.committed)
        if self._arming.arm(level, current):
            self._touch()
        if level.stage is Stage.CUT:
            self._cut()
            order_save(level, self.workers.current.values(), time.monotonic())
        self._arming.answer(level, current)
        if level.stage is Stage.OVER:
            self.workers.end_current()

    def _wants_fresh(self, published: Levels) -> bool:
        over = self.failure is not None or self.fatal is not None
        if self.quiet or self.leaving or over:
            return False
        return is_fresh_wanted(published, self.me.slot, self.workers.current.values())

    def _join(self, published: Levels) -> None:
        free = self.workers.group_over() and self.workers.ready_lives()
        if free and published.round > max(self.joined, self.epoch):
            self.joined = published.round
            self._touch()

    def _begin(self, published: Levels) -> None:
        level = published.epoch
        if level is None or not level.live or level.number <= self.epoch:
            return
        mine = level.member(*self.me.id)
        if mine is None or self.joined != level.number or self._restorer.epoch >= level.number:
            return
        self._restorer.ask(level.number, level.commit, partial(self._restored, level, mine))

    async def _restored(
        self, level: EpochLevel, mine: EpochMember, fetched: Fetched | None, seconds: float
    ) -> None:
        newest = self._newest.epoch if self._newest else None
        if newest is None or newest.number != level.number or not newest.live:
            return
        if self.workers.ready_lives() != mine.lives:
            self._touch()
            return
        if self.uploads is not None:
            await self.uploads.close()
        self._start(level, mine, fetched, seconds)

    def _start(
        self, level: EpochLevel, mine: EpochMember, fetched: Fetched | None, restore: float
    ) -> None:
        now = time.monotonic()
        self._ledger.begin(now, restore=restore, first=self.epoch == 0)
        self.epoch, self.level = level.number, level
        self._arming, self._restorer.broken, self._notes = Arming(), None, ()
        self._book.rewind(level.resume)
        self.uploads = Uploads(
            self.store,
            level.token,
            self._book,
            on_part=self._on_part,
            on_failed=self._unsaved,
            line=self.line,
        )
        self.workers.begin(
            lambda worker: build_start(self.settings, worker.local, level, mine, fetched)
        )
        self._touch()

    def _cut(self) -> None:
        now = time.monotonic()
        if all(w.cut_at is None for w in self.workers.current.values()):
            self._ledger.cut(now)
        for worker in self.workers.current.values():
            self._rest(worker, now)
        self.workers.cut(self.epoch)

    def _rest(self, worker: Worker, now: float) -> None:
        """This rank trains no more: from here its seconds are the agent's to charge."""
        if worker.epoch == self.epoch and not self._ledger.rests(worker.local):
            self._ledger.page(worker.local, worker.life, worker.position())
            if worker.started_at is not None:
                in_order = worker.stays or worker.state is State.FINISHED
                spent, kind = now - worker.started_at, "idle" if in_order else "detect"
                self._ledger.tail(worker.local, worker.life, spent, kind)
            self._ledger.rest(worker.local, now)

    # --- workers ---------------------------------------------------------------------------------

    def _frame(self, worker: Worker, envelope: wire.Envelope) -> None:
        frame = envelope.frame
        if isinstance(frame, STORE_FRAMES):
            self._relay.take(worker, envelope)
            return
        match frame:
            case wire.Hello():
                worker.state, worker.ready_at = State.READY, time.monotonic()
                self.line.say("worker_ready", local=worker.local, life=worker.life, pid=worker.pid)
            case wire.Tracked():
                worker.state, worker.tracked = State.TRACKED, frame
                self.line.say(
                    "worker_runs",
                    rank=worker.rank,
                    pid=worker.pid,
                    applied=frame.applied,
                    bytes=frame.bytes,
                )
            case wire.Applied():
                self._applied(worker, frame)
            case wire.AtBoundary():
                worker.asking = (envelope.id, frame.step)
                if self.level is not None:
                    self._arming.answer(self.level, [worker])
            case wire.Staged():
                self._staged(worker, frame)
            case wire.Parked():
                worker.state, worker.parked = State.PARKED, frame
                if self.level is not None and self.level.stage is Stage.CUT:
                    order_save(self.level, [worker], time.monotonic())
            case wire.Finished():
                worker.state, worker.finished = State.FINISHED, frame.step
            case wire.Failed():
                self._failed(worker, frame)
        if not isinstance(frame, wire.Applied):
            self._touch()
        if isinstance(frame, (wire.Hello, wire.Parked)) and self._newest is not None:
            self.apply(self._newest)

    def _applied(self, worker: Worker, frame: wire.Applied) -> None:
        worker.applied = frame
        if frame.epoch == self.epoch:
            self._book.add(frame.entries)
        if frame.notes and worker.local == 0:
            self._notes = (*self._notes, *frame.notes)[-5:]
        if frame.notes or (self.level is not None and frame.step == self.level.resume + 1):
            self._touch()

    def _staged(self, worker: Worker, frame: wire.Staged) -> None:
        if frame.whole:
            worker.saving_since = None
        if frame.problem:
            self._unstaged(worker, frame)
            return
        worker.staged = max(worker.staged, frame.step)
        if self.uploads is None or frame.epoch != self.epoch:
            os.unlink(frame.path)
            return
        self.line.say(
            "staged",
            step=frame.step,
            rank=worker.rank,
            whole=frame.whole or None,
            ms=round(frame.ms),
        )
        self.uploads.add(frame, worker.rank)

    def _unstaged(self, worker: Worker, frame: wire.Staged) -> None:
        if self.uploads is not None and frame.epoch == self.epoch:
            self.uploads.give_up(frame, worker.rank, frame.problem)

    def _unsaved(self, staged: wire.Staged, rank: int) -> None:
        """Another rank may do better."""
        for worker in self.workers.current.values():
            if worker.rank == rank and staged.whole:
                worker.unsaved = True
                self._touch()

    def _failed(self, worker: Worker, frame: wire.Failed) -> None:
        worker.state, worker.failed = State.FAILED, build_failure(frame)
        self.line.say(
            "worker_failed",
            rank=worker.rank,
            cause=frame.cause,
            step=frame.step,
            message=frame.message,
        )

    def _death(self, worker: Worker) -> None:
        self._rest(worker, time.monotonic())
        if not worker.asked:
            how = worker.exit_words()
            self.line.say(
                "worker_ended", local=worker.local, life=worker.life, pid=worker.pid, message=how
            )
            if worker.failed is None and worker.status is not None and os.WIFEXITED(worker.status):
                worker.failed = build_exit_failure(worker)
            if worker.epoch == 0:
                self._died_early(worker)
        self._touch()
        if self._newest is not None:
            self.apply(self._newest)

    def _died_early(self, worker: Worker) -> None:
        """Before it was in any epoch. A script that ends by itself will do so again."""
        if worker.failed is not None:
            self.failure = worker.failed
            return
        self.early_deaths += 1
        if self.early_deaths < EARLY_DEATHS and not self.quiet and not self.leaving:
            self.workers.ensure_fresh()
            return
        what = f"the worker {worker.exit_words()} before it began, {self.early_deaths} times"
        self.fatal = FailureReport(cause=report.Cause.WORKER_DIED.value, message=what)

    def check_hangs(self, now: float) -> None:
        limits = hang.Limits(step=self.settings.hang_seconds, startup=self.settings.startup_seconds)
        for worker in self.workers.check_hangs(limits, now):
            self.line.say("worker_hung", rank=worker.rank, pid=worker.pid, message=worker.hung)

    # --- report ----------------------------------------------------------------------------------

    def _touch(self) -> None:
        self.changed.set()

    def build_report(self, now: float) -> AgentReport:
        current = [self.workers.current[i] for i in sorted(self.workers.current)]
        for worker in current:
            if not self._ledger.rests(worker.local):
                self._ledger.page(worker.local, worker.life, worker.position())
        lead = current[0] if current else None
        return AgentReport(
            slot=self.me.slot,
            attempt=self.me.attempt,
            incarnation=self.me.incarnation,
            address=self.me.address,
            joined=self.joined,
            epoch=self.epoch,
            workers=tuple(build_worker_report(w, now) for w in current),
            fresh=self.workers.ready_lives() if self.workers.group_over() else (),
            ended=self.workers.ended_lives(),
            leaving=self.leaving,
            acked=self._arming.acked,
            passed=self._arming.passed(self.level, current),
            staged=min((w.staged for w in current), default=0),
            cut=self._cut_heard,
            held=self._held(),
            former_epoch=self._former.epoch,
            former_step=self._former.applied,
            until=lead.tracked.until if lead and lead.tracked else None,
            loss=lead.applied.loss if lead and lead.applied else None,
            notes=self._notes,
            state_bytes=lead.tracked.bytes if lead and lead.tracked else 0,
            broken=self._restorer.broken,
            storage_error=self._storage_error(),
            failure=self.failure,
            seconds=self._ledger.total(),
        )

    def _held(self) -> EpochLevel | None:
        return None if self.workers.group_over() else find_unheard_of(self.level, self._newest)

    def _storage_error(self) -> levels.StorageError | None:
        waits = self.store.trouble.to_level() if self.store.trouble else None
        return self._restorer.error or (self.uploads.error if self.uploads else None) or waits

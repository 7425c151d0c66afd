"""One pod's part in the job: compares the coordinator's levels with its own workers and acts on the
difference.

`apply` is idempotent: it may be called at any time with any levels, compares them with the workers'
states, and does what is missing.
"""

import asyncio
import os
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from everstep_agent.checkpoint.ledger import Book
from everstep_agent.checkpoint.parts import Part
from everstep_agent.checkpoint.restore import Fetched
from everstep_agent.context import Context
from everstep_agent.live_settings import apply_wanted
from everstep_agent.peers.agent_report import AgentReport, FailureReport, State
from everstep_agent.peers.budget import Budget
from everstep_agent.peers.epoch_level import EpochLevel, EpochMember, Stage
from everstep_agent.peers.messages import Levels
from everstep_agent.pod import device_waits, hang, head_start, refusals, spawn
from everstep_agent.pod.arming import Arming, order_held_save, order_save
from everstep_agent.pod.copies import Copies
from everstep_agent.pod.deaths import Deaths
from everstep_agent.pod.fetch_ledger import LedgerFetcher
from everstep_agent.pod.fetch_state import Restorer
from everstep_agent.pod.hang_watch import HangWatch
from everstep_agent.pod.in_place_join import InPlaceJoin
from everstep_agent.pod.pod_saves import PodSaves
from everstep_agent.pod.relay import STORE_FRAMES, Relay
from everstep_agent.pod.save_queue import Listener
from everstep_agent.pod.share_reader import ShareReader
from everstep_agent.pod.time_ledger import TimeLedger, is_spare
from everstep_agent.pod.worker import Worker
from everstep_agent.pod.worker_report import build_worker_report, find_unheard_of
from everstep_agent.pod.worker_start import (
    build_regroup,
    build_start,
    is_fresh_wanted,
)
from everstep_agent.pod.workers import Events, Place, WorkerSet
from everstep_contract import levels, places, position, wire


class Pod:
    """`changed` is set whenever the report has news; `on_part` receives every uploaded part;
    `former` is the position of the workers before the container's last restart.
    """

    def __init__(
        self,
        context: Context,
        *,
        spawner: spawn.Spawner,
        environ: Mapping[str, str],
        relay: Relay,
        on_part: Callable[[Part], None],
        former: position.Position | None = None,
    ) -> None:
        self.settings = settings = context.settings
        self._former = former or position.Position()
        self.me = context.me
        self.store = store = context.store
        self.line = line = context.line
        self.relay = relay
        self.changed = asyncio.Event()
        self.news = asyncio.Event()
        """Set whenever `look` may find something to do before it is due."""
        self._leave_by: float | None = None
        """By when (`time.monotonic`) this pod ends; None: no SIGTERM."""
        self.quiet = False
        """Start no more fresh workers: this pod leaves, or the job ends."""
        self.deaths = Deaths(context.me, context.line)
        self.epoch = 0
        self.joined, self.joined_token = 0, ""
        self._cut_heard = 0
        self.level: EpochLevel | None = None
        """The level of the epoch that the local workers are in."""
        self._newest: Levels | None = None
        restore = Path(settings.memory) / "restore"
        self.memory, self.disk = context.memory, context.disk
        self._copies = Copies(context, relay.pool, self._touch)
        self._restorer = Restorer(store, restore, self.memory, self._touch, line, self._fail)
        self._share_reader = ShareReader(
            store,
            Budget(settings.read_back_bandwidth),
            uploads=lambda: self.saves.busy,
            on_news=self._touch,
            line=line,
        )
        self._arming = Arming()
        self.book = Book()
        self._ledger_fetcher = LedgerFetcher(relay.pool, self.book, self._touch, line)
        listener = Listener(on_part=on_part, on_failed=self._unsaved, on_held=self._touch)
        self.saves = PodSaves(context, self.book, listener, self._touch)
        self._dropped = context.dropped
        self._error: BaseException | None = None
        """A bug in Everstep, met in a task of its own."""
        self._ledger = TimeLedger()
        self._notes: tuple[str, ...] = ()
        self._own_notes: tuple[str, ...] = ()
        self._refusals: refusals.Refusals = {}
        self._refused: Collection[int] = ()
        """Local ranks whose next worker waits after a failed join."""
        self._head_start: head_start.HeadStart | None = None
        self.workers = WorkerSet(
            spawner=spawner,
            place=Place(count=settings.workers, memory=settings.memory, environ=environ),
            events=Events(
                on_frame=self._frame,
                on_last_frame=lambda worker: self.saves.clear(worker.pid),
                on_death=self._death,
                on_gone=self._gone,
                on_error=self._fail,
            ),
            log=line,
        )
        self._hang_watch = HangWatch(self.workers, self._touch, line)
        given = hang.Limits(step=settings.hang_seconds, startup=settings.startup_seconds)
        self._limits_by: tuple[levels.Wanted | None, hang.Limits] = None, given
        """The document that the limits were computed from (None: the settings), and the limits."""
        self._joining = InPlaceJoin(settings, context.me, self.workers, self._ledger_fetcher, line)

    async def open(self) -> None:
        for name in ("staging", "restore"):
            os.makedirs(os.path.join(self.settings.memory, name), exist_ok=True)
        await self.saves.open()
        await self.workers.open()
        for local in range(self.settings.workers):
            self._ledger.rest(local, time.monotonic())
        self.workers.ensure_fresh()

    @property
    def leaving(self) -> bool:
        return self._leave_by is not None

    def leave(self, by: float) -> None:
        """This pod ends by this time (`time.monotonic`)."""
        self._leave_by = by
        self._copies.hurry()
        self._touch()

    def list_copied(self) -> dict[str, int]:
        """Place other than the store → newest uncommitted step that this pod has saved there."""
        own = max((save.step for save in self.memory.list_saves()), default=0)
        found = {
            "this pod's memory": own,
            "another pod's memory": self._copies.peer_step,
            "the node's disk": self._copies.disk_step,
        }
        return {place: step for place, step in found.items() if step > self.memory.committed}

    async def clear_disk(self) -> None:
        """As `Copies.clear_disk`."""
        await self._copies.clear_disk()

    async def close(self) -> None:
        await self._restorer.close()
        await self._share_reader.close()
        await self._ledger_fetcher.close()
        await self._copies.close()
        await self.saves.close()
        await self.workers.close()

    # --- levels ----------------------------------------------------------------------------------

    def apply(self, published: Levels) -> None:
        if self._newest is None or published.version != self._newest.version:
            self.news.set()
        self._newest, self.deaths.wanted = published, published.wanted
        if self._trained:
            self.deaths.hear_trained()
        self.deaths.look(time.monotonic())
        if is_spare(published, levels.SlotAttempt(slot=self.me.slot, attempt=self.me.attempt)):
            self._ledger.spare(time.monotonic(), first=self.epoch == 0)
        level = published.epoch
        if level is not None and level.stage in (Stage.CUT, Stage.OVER):
            self._cut_heard = max(self._cut_heard, level.number)
        self._join_in_place(level)
        self._apply_to_current(published)
        if published.round:
            self._keep_refusals(refusals.forget_failed(self._refusals))
        self.saves.finish(published.unfinished)
        self._share_reader.follow(published.read_back, self.me.id)
        if self._wants_fresh(published):
            self._ensure_fresh()
        self._join(published)
        self._begin(published)

    def _apply_to_current(self, published: Levels) -> None:
        level = published.epoch
        if self.epoch == 0:
            return
        if level is not None:
            if level.number == self.epoch:
                self._joining.give(level)
            self._continue_in_place(level)
        # A round alone ends nothing: its coordinator may not know of our epoch yet, and our state
        # may be the only copy.
        known = level.claimed if level else 0
        if max(known, published.claimed if known < self.epoch else 0) > self.epoch:
            if not self.workers.group_over() and not self._kept_out:
                self._cut()
                self.workers.end_current()
            return
        if level is None or level.number != self.epoch:
            return
        self.level, current = level, list(self.workers.current.values())
        self._copies.aim(level, published.wanted)
        self._hang_watch.end(level.hung, self.me.slot, self._node)
        if level.successor > self.joined:
            self.joined, self.joined_token = level.successor, level.successor_token
            if level.stage is not Stage.HOLD or self._all_reported():
                self._touch()
        self.saves.follow(level, published.seen.good)
        if self._arming.arm(level, current):
            self._touch()
        if self.me.id in level.leaving:
            self.workers.end_current()
        if level.stage is Stage.HOLD:
            self._hold(level)
        if level.stage is Stage.CUT:
            self._cut()
            self.workers.end_ranks(level.ended)
            order_save(level, self.workers.current.values(), time.monotonic())
            self.saves.look_for_copies(level.number)
        self._arming.answer(level, current)
        if level.stage is Stage.OVER:
            self.workers.end_current()

    def _hold(self, level: EpochLevel) -> None:
        self.workers.hold(level.number)
        self.workers.end_ranks(level.ended)
        order_held_save(level, self.workers.current.values())
        for worker in self.workers.current.values():
            if worker.rank == level.asked and worker.alive and not worker.asked_vector:
                worker.asked_vector = True
                worker.send(wire.GiveVector(epoch=level.number))

    def _join_in_place(self, level: EpochLevel | None) -> None:
        mine = self._joining.find_place(level)
        if level is None or mine is None or level.number < self.joined:
            self._joining.follow(level)
            return
        self._ledger.begin(time.monotonic(), restore=0.0, first=self.epoch == 0)
        entered = self._joining.enter(mine)
        self.deaths.entered_epoch()
        self._refusals = {}
        self._enter_in_place(level, mine)
        for worker in entered:
            self._say_that_it_runs(worker)

    def _continue_in_place(self, level: EpochLevel) -> None:
        """Enter `level` with the local workers, if it continues their epoch in place."""
        mine = self._find_place(level)
        cut = any(w.alive and w.cut_at is not None for w in self.workers.current.values())
        if mine is not None and level.number >= self.joined and not cut:
            self._enter_in_place(level, mine)

    def _find_place(self, level: EpochLevel) -> EpochMember | None:
        """The place of the local workers in an epoch that continues theirs."""
        mine = level.place_after(self.epoch, self.me.id)
        return mine if mine is not None and self.workers.are_current(mine.lives) else None

    @property
    def _kept_out(self) -> bool:
        """Whether the newest epoch has a place for the local workers that they did not take: they
        have joined a later epoch, or another coordinator has cut theirs. Nothing ends them until
        their state is saved.
        """
        level = self._newest.epoch if self._newest is not None else None
        return level is not None and self._find_place(level) is not None

    def _enter_in_place(self, level: EpochLevel, mine: EpochMember) -> None:
        self.epoch, self.level = level.number, level
        self.joined, self.joined_token = level.number, level.token
        self._arming = Arming()
        self.book.rewind(level.resume)
        self.saves.enter(level.number, level.token)
        self.workers.continue_in(
            mine.lives, lambda worker: build_regroup(worker.local, level, mine)
        )

    def _wants_fresh(self, published: Levels) -> bool:
        if self.quiet or self.leaving or self.deaths.over:
            return False
        if head_start.lasts(self._head_start, published, time.monotonic()):
            return False
        over = [local not in self._list_staying() for local in range(self.settings.workers)]
        return is_fresh_wanted(published, self.me.slot, over)

    def _ensure_fresh(self) -> None:
        self.workers.ensure_fresh({*self._held_back, *self._list_staying()})

    def _list_staying(self) -> set[int]:
        """Local ranks whose worker continues."""
        current = self.workers.current.items()
        return {n for n, w in current if w.alive and w.cut_at is None and not w.asked}

    def _join(self, published: Levels) -> None:
        ready = self.workers.group_over() and self.workers.ready_lives()
        free = ready and not self._held_back
        if free and published.round > max(self.joined, self.epoch):
            self.joined, self.joined_token = published.round, ""
            self._touch()

    def _begin(self, published: Levels) -> None:
        level = published.epoch
        if level is None or not level.live or level.number <= self.epoch:
            return
        mine = level.member(*self.me.id)
        if mine is None or self.joined != level.number or self._restorer.epoch >= level.number:
            return
        nearer = self._copies.list_nearer(level.members, mine.address)
        whole = level.mesh.holds_unit(mine.ranks.values())
        then = partial(self._restored, level, mine)
        self._restorer.ask(level.number, level.commit, nearer, then, whole=whole)

    async def _restored(
        self, level: EpochLevel, mine: EpochMember, fetched: Fetched | None, seconds: float
    ) -> None:
        if not self._may_start(level, mine):
            return
        await self.saves.end()
        if self._may_start(level, mine):  # still
            self._start(level, mine, fetched, seconds)

    def _may_start(self, level: EpochLevel, mine: EpochMember) -> bool:
        """Whether this epoch is still the newest one, and its workers live."""
        newest = self._newest.epoch if self._newest else None
        if newest is None or newest.number != level.number or not newest.live:
            return False
        if self.workers.ready_lives() != mine.lives:
            self._touch()
            return False
        return True

    def _start(
        self, level: EpochLevel, mine: EpochMember, fetched: Fetched | None, restore: float
    ) -> None:
        now = time.monotonic()
        self._ledger.begin(now, restore=restore, first=self.epoch == 0)
        self.epoch, self.level = level.number, level
        self._arming, self._restorer.broken = Arming(), None
        self._notes = self._own_notes = ()
        self.book.rewind(level.resume)
        self.saves.enter(level.number, level.token)
        self.deaths.entered_epoch()
        self._refusals = {}
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
        """This rank no longer trains: from now on the agent accounts for its seconds."""
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
            self.relay.take(worker, envelope)
            return
        if not worker.alive and not isinstance(frame, (wire.Applied, wire.Staged)):
            return  # sent before the worker was killed; only completed work still counts
        match frame:
            case wire.Hello():
                worker.state, worker.ready_at = State.READY, time.monotonic()
                worker.in_place = frame.in_place
                self.workers.heard(worker)
                self.line.say("worker_ready", local=worker.local, life=worker.life, pid=worker.pid)
            case wire.Tracked():
                worker.state, worker.tracked = State.TRACKED, frame
                if worker.epoch:  # one that gets ready to join has no rank yet
                    self._say_that_it_runs(worker)
            case wire.Stops() if worker.tracked is not None:
                worker.tracked = replace(worker.tracked, until=frame.step)
            case wire.Applied():
                self._applied(worker, frame)
            case wire.AtBoundary():
                worker.asking = (envelope.id, frame.step)
                if self.level is not None:
                    self._arming.answer(self.level, [worker])
            case wire.FetchChunk():
                worker.fetches += self._restorer.bring(
                    frame, partial(_give_chunk, worker, envelope.id)
                )
            case wire.Staged():
                self.saves.take(worker, frame, self.level)
            case wire.Standing():
                self._standing(worker, frame)
            case wire.TakingState():
                worker.taking = frame
            case wire.StateTaken():
                if frame.problem:
                    self._refuse(worker.local, frame.problem, differs=frame.differs)
                self._joining.taken(worker, frame)
            case wire.Regrouped():
                self._regrouped(worker, frame)
            case wire.Parked():
                worker.state, worker.parked = State.PARKED, frame
                if worker.joins and not worker.epoch:
                    self._not_prepared(worker, frame)
                if self.level is not None and self.level.stage is Stage.CUT:
                    order_save(self.level, [worker], time.monotonic())
            case wire.Finished():
                worker.state, worker.finished = State.FINISHED, frame.step
            case wire.Failed():
                worker.state = State.FAILED
                self.deaths.failed(worker, frame, trained=self._trained, now=time.monotonic())
            case _:  # from a newer protocol, or a frame that only agents send: ignored
                kind = type(frame).__name__
                self.line.say("frame_ignored", local=worker.local, pid=worker.pid, kind=kind)
                return
        if not isinstance(frame, (wire.Applied, wire.Standing, wire.Regrouped)):
            self._touch()
        if isinstance(frame, (wire.Hello, wire.Parked)) and self._newest is not None:
            self.apply(self._newest)

    def _standing(self, worker: Worker, frame: wire.Standing) -> None:
        if frame.epoch == worker.epoch:
            worker.standing = frame
            if worker.state in (State.STARTED, State.TRACKED):
                worker.state = State.HELD
        holds = self.level is not None and self.level.stage is Stage.HOLD
        if not holds or frame.problem or self._all_reported():
            self._touch()

    def _all_reported(self) -> bool:
        """Whether all living local ranks have reported their standing. Until then this agent has no
        news for a coordinator that waits for it, and a report would only take a core that a rank needs.
        """
        return all(w.standing is not None for w in self.workers.current.values() if w.alive)

    def _regrouped(self, worker: Worker, frame: wire.Regrouped) -> None:
        if frame.problem:
            self.line.say("regroup_failed", rank=worker.rank, message=frame.problem)
            if frame.epoch == worker.epoch:
                worker.not_formed = frame.problem
        elif frame.epoch == worker.epoch and worker.state is State.HELD and not worker.standing:
            worker.state = State.TRACKED
        if frame.problem or all(w.state is not State.HELD for w in self.workers.current.values()):
            self._touch()

    def _say_that_it_runs(self, worker: Worker) -> None:
        if (found := worker.tracked) is None:
            return
        self.line.say(
            "worker_runs",
            rank=worker.rank,
            pid=worker.pid,
            applied=found.applied,
            bytes=found.bytes,
        )

    def _applied(self, worker: Worker, frame: wire.Applied) -> None:
        worker.applied = frame
        # The last step of the former epoch may be marked applied after this one has begun.
        level = self.level
        ended = level.resume if level is not None and level.in_place is not None else 0
        if frame.epoch == self.epoch or frame.step <= ended:
            self.book.add(frame.entries)
        if frame.notes and worker.local == 0:
            self._notes = (*self._notes, *frame.notes)[-5:]
        self._own_notes = (*self._own_notes, *frame.own_notes)[-5:]
        told = frame.notes or frame.own_notes
        if told or (self.level is not None and frame.step == self.level.resume + 1):
            self._touch()

    def _unsaved(self, staged: wire.Staged, rank: int) -> None:
        """Report a full-state save that failed, so that another rank can be asked to save."""
        for worker in self.workers.current.values():
            if worker.rank == rank and staged.whole:
                worker.unsaved, worker.whole = True, 0
                self._touch()

    @property
    def _held_back(self) -> Collection[int]:
        """Local ranks that wait for the operator's judgment of their device, or after a failed join."""
        return {*device_waits.held_locals(self.deaths.waits), *self._refused}

    def _not_prepared(self, worker: Worker, frame: wire.Parked) -> None:
        self.line.say("not_prepared", local=worker.local, message=frame.why)
        if self.workers.fresh.get(worker.local) is worker:  # otherwise it was no longer invited
            self._refuse(worker.local, frame.why)
        self.workers.recycle(0)

    def _refuse(self, local: int, problem: str, *, differs: bool = False) -> None:
        now = time.monotonic()
        self._keep_refusals(refusals.refuse(self._refusals, local, problem, now, differs=differs))

    def _keep_refusals(self, found: refusals.Refusals) -> None:
        if found != self._refusals:
            self._refusals = found
            self._refused = refusals.held_locals(found, time.monotonic())
            self._touch()

    def _ends_refusal(self, now: float) -> bool:
        before, self._refused = self._refused, refusals.held_locals(self._refusals, now)
        return before != self._refused

    @property
    def _trained(self) -> bool:
        """Whether this job has applied a step, so its script and template work. A former job may have trained the same
        run with another script.
        """
        seen = self._newest.seen if self._newest is not None else levels.Seen()
        return seen.epoch > 0 and seen.step > 0

    @property
    def _failure(self) -> FailureReport | None:
        """A failure that ends the job. Not before a coordinator that has read the run log has told this
        pod whether the job has trained.
        """
        told = self._newest is not None and self._newest.seen.run != ""
        return self.deaths.failure if told else None

    def _death(self, worker: Worker) -> None:
        now = time.monotonic()
        self._rest(worker, now)
        if worker.epoch and worker.in_place:
            self._head_start = head_start.begin(self._newest, now)
        if not worker.asked:
            self.deaths.died(worker, trained=self._trained, now=now)
            early = worker.epoch == 0 and self._died_early(worker)
            if early and not self.quiet and not self.leaving:
                self._ensure_fresh()
        self._gone()

    def _died_early(self, worker: Worker) -> bool:
        return self.deaths.died_early(worker, trained=self._trained)

    def _why_not_joined(self) -> str:
        if self.deaths.fatal is not None and not self.workers.group_over():
            rest = "the other ranks of this pod go on, and this one is not replaced"
            return f"{self.deaths.fatal.message}; {rest}"
        return refusals.describe(self._refusals)

    def _gone(self) -> None:
        self._touch()
        if self._newest is not None:
            self.apply(self._newest)

    @property
    def restored_from(self) -> Mapping[str, int]:
        """Tier → how many chunks of the last restore came from it."""
        return self._restorer.sources

    def look(self, now: float) -> None:
        """Do what depends on time alone. Raises what a task has raised, so that the agent ends."""
        if self._error is not None:
            raise self._error
        self._hang_watch.look(self._limits, now, self._node)
        for worker in self.workers.find_stuck(now):
            self.deaths.survives_kill(worker)
            self._touch()
        self.deaths.memory.look(now)
        ended = self.deaths.look(now) | self._ends_refusal(now)
        if self._newest is not None and (ended or self._ends_head_start(self._newest, now)):
            self._gone()

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self.news.set()

    def _ends_head_start(self, published: Levels, now: float) -> bool:
        if self._head_start is None or head_start.lasts(self._head_start, published, now):
            return False
        self._head_start = None
        return True

    def look_at_progress(self) -> float:
        """Look at the workers' progress. Returns the seconds until the next look."""
        return self._hang_watch.look_at_progress(self._limits.step)

    @property
    def _node(self) -> str:
        return self.deaths.wanted.find_node(*self.me.place)

    @property
    def _limits(self) -> hang.Limits:
        wanted, limits = self._limits_by
        if wanted is not self.deaths.wanted:  # computed once for each document
            wanted = self.deaths.wanted
            live = apply_wanted(self.settings, wanted)
            limits = hang.Limits(step=live.hang_seconds, startup=live.startup_seconds)
            self._limits_by = wanted, limits
        return limits

    # --- report ----------------------------------------------------------------------------------

    def _touch(self) -> None:
        self.changed.set()
        self.news.set()

    def build_report(self, now: float) -> AgentReport:
        current = [self.workers.current[i] for i in sorted(self.workers.current)]
        for worker in current:
            if not self._ledger.rests(worker.local):
                self._ledger.page(worker.local, worker.life, worker.position())
        lead = current[0] if current else None
        received, expected = self._joining.count_bytes()
        return AgentReport(
            slot=self.me.slot,
            attempt=self.me.attempt,
            incarnation=self.me.incarnation,
            address=self.me.address,
            joined=self.joined,
            joined_token=self.joined_token,
            epoch=self.epoch,
            workers=tuple(
                build_worker_report(w, w.position(), w.exit_text(), now) for w in current
            ),
            fresh=self.workers.ready_lives(),
            ended=self.workers.ended_lives(),
            prepared=self.workers.prepared_lives(),
            taken=self._joining.step,
            received=received,
            expected=expected,
            in_place=self.workers.can_regroup(),
            fixed=next((w.tracked.fixed for w in current if w.alive and w.tracked), ""),
            leaving=self.leaving,
            notice=None if self._leave_by is None else max(0.0, self._leave_by - now),
            acked=self._arming.acked,
            passed=self._arming.passed(self.level, current),
            staged=min((w.staged for w in current), default=0),
            kept=self.saves.list_held(len(current)),
            copied=self._copies.peer_step,
            cut=self._cut_heard,
            held=self._held(),
            unsent=self.saves.list_unsent(),
            unsent_of=self.saves.known,
            former_epoch=self._former.epoch,
            former_step=self._former.applied,
            until=lead.tracked.until if lead and lead.tracked else None,
            loss=lead.applied.loss if lead and lead.applied else None,
            pins=self.saves.pins,
            notes=self._notes,
            own_notes=self._own_notes,
            not_joined=self._why_not_joined(),
            dropped=self._dropped(),
            uploading=self.saves.busy,
            state_bytes=lead.tracked.bytes if lead and lead.tracked else 0,
            read_back=self._share_reader.report(),
            broken=self._restorer.broken,
            storage_error=self._storage_error(),
            stuck=self.deaths.stuck.message if self.deaths.stuck else "",
            device_deaths=device_waits.to_levels(
                self.deaths.waits, self.me.slot, self.me.attempt, now
            ),
            failure=self._failure,
            seconds=self._ledger.total(now, self._waits_as),
        )

    @property
    def _waits_as(self) -> str:
        """The time ledger's category for local ranks that wait now."""
        newest = self._newest
        stops = newest is not None and (
            newest.end is not None or newest.wanted.stop is not levels.Stop.NONE
        )
        leaves = self.leaving or (newest is not None and self.me.slot in newest.wanted.leave)
        if self.quiet or stops or leaves:
            return "idle"
        return "startup" if self.epoch == 0 else "regroup"

    def _held(self) -> EpochLevel | None:
        if self.workers.group_over():
            return None
        return find_unheard_of(self.level, self._newest, kept_out=self._kept_out)

    def _storage_error(self) -> levels.StorageError | None:
        waits = self.store.trouble.to_level() if self.store.trouble else None
        return self._restorer.error or self.saves.error or self._share_reader.error or waits


def _give_chunk(worker: Worker, request: int, place: places.Place) -> None:
    worker.fetches, worker.fetched_at = worker.fetches - 1, time.monotonic()
    worker.send(wire.FetchedChunk(place=place), request)

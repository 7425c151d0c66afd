"""One pod's part in the job: compares the coordinator's levels with its own workers and acts on the
difference.

`apply` is idempotent: it may be called at any time with any levels, compares them with the workers'
states, and does what is missing.
"""

import time
from collections.abc import Callable, Mapping
from functools import partial

from everstep_agent.checkpoint.parts import Part
from everstep_agent.checkpoint.restore import Fetched
from everstep_agent.context import Context
from everstep_agent.peers.agent_report import AgentReport, State
from everstep_agent.peers.epoch_level import EpochLevel, EpochMember, Stage
from everstep_agent.peers.messages import Levels
from everstep_agent.pod import spawn
from everstep_agent.pod.arming import order_held_save, order_save
from everstep_agent.pod.components import Components
from everstep_agent.pod.news import News
from everstep_agent.pod.pod_report import PodReport
from everstep_agent.pod.relay import Relay
from everstep_agent.pod.save_queue import Listener
from everstep_agent.pod.time_ledger import is_spare
from everstep_agent.pod.worker import Worker
from everstep_agent.pod.worker_frames import WorkerFrames
from everstep_agent.pod.worker_processes import Events, Place
from everstep_agent.pod.worker_start import build_regroup, build_start, is_fresh_wanted
from everstep_agent.pod.workers import WorkerSet
from everstep_contract import levels, position, wire


class Pod:
    """`on_part` receives every uploaded part; `former` is the position of the workers before the
    container's last restart.
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
        self.settings, self.me = context.settings, context.me
        self.memory, self.disk = context.memory, context.disk
        self.relay = relay
        self.news = news = News()
        self.workers = WorkerSet(
            spawner=spawner,
            place=Place(count=self.settings.workers, memory=self.settings.memory, environ=environ),
            events=Events(
                on_frame=lambda worker, envelope: self.frames.take(worker, envelope),
                on_last_frame=lambda worker: self.saves.clear(worker.pid),
                on_death=self._death,
                on_gone=self._apply_again_and_report,
                on_error=news.fail,
            ),
            log=context.line,
        )
        listener = Listener(on_part=on_part, on_failed=self._unsaved, on_held=news.touch)
        self.parts = parts = Components(
            context, news=news, workers=self.workers, relay=relay, listener=listener
        )
        self.epoch, self.deaths, self.holds = parts.epoch, parts.deaths, parts.holds
        self.saves, self.book = parts.saves, parts.book
        self._seconds, self._joining = parts.seconds, parts.joining
        self._copies, self._restorer = parts.copies, parts.restorer
        self._share_reader, self._hang_watch = parts.share_reader, parts.hang_watch
        self.frames = WorkerFrames(parts, self._apply_again)
        self._report = PodReport(parts, self.frames, former or position.Position())

    async def open(self) -> None:
        await self.parts.open()
        self.workers.ensure_fresh()

    async def close(self) -> None:
        await self.parts.close()

    def leave(self, by: float) -> None:
        """This pod ends by this time (`time.monotonic`)."""
        self.holds.leave_by = by
        self._copies.hurry()
        self.news.touch()

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

    @property
    def restored_from(self) -> Mapping[str, int]:
        """Tier → how many chunks of the last restore came from it."""
        return self._restorer.sources

    def build_report(self, now: float) -> AgentReport:
        return self._report.build(now)

    # --- levels ----------------------------------------------------------------------------------

    def apply(self, published: Levels) -> None:
        if self.epoch.hear(published):
            self.news.to_look.set()
        self.deaths.wanted = published.wanted
        if self.epoch.trained:
            self.deaths.hear_trained()
        self.deaths.look(time.monotonic())
        if is_spare(published, levels.SlotAttempt(slot=self.me.slot, attempt=self.me.attempt)):
            self._seconds.spare(time.monotonic(), first=self.epoch.number == 0)
        self._join_in_place(published.epoch)
        self._apply_to_current(published)
        if published.round:
            self.holds.forget_failed()
        self.saves.finish(published.unfinished)
        self._share_reader.follow(published.read_back, self.me.id)
        if self._wants_fresh(published):
            self._ensure_fresh()
        self._join(published)
        self._begin(published)

    def _apply_again(self) -> None:
        if self.epoch.newest is not None:
            self.apply(self.epoch.newest)

    def _apply_again_and_report(self) -> None:
        self.news.touch()
        self._apply_again()

    def _apply_to_current(self, published: Levels) -> None:
        """Do what the levels ask of the workers that are in an epoch."""
        level, epoch = published.epoch, self.epoch
        if epoch.number == 0:
            return
        if level is not None:
            if level.number == epoch.number:
                self._joining.give(level)
            self._continue_in_place(level)
        # A round alone ends nothing: its coordinator may not know of our epoch yet, and our state
        # may be the only copy.
        known = level.claimed if level else 0
        if max(known, published.claimed if known < epoch.number else 0) > epoch.number:
            if not self.workers.group_over() and not self.parts.kept_out:
                self._cut()
                self.workers.end_current()
        elif level is not None and level.number == epoch.number:
            self._follow(level, published)

    def _follow(self, level: EpochLevel, published: Levels) -> None:
        """Do what is missing in the workers' own epoch."""
        epoch = self.epoch
        epoch.level, current = level, list(self.workers.current.values())
        self._copies.aim(level, published.wanted)
        self._hang_watch.end(level.hung, self.me.slot, self.parts.node)
        if level.successor > epoch.joined:
            epoch.join(level.successor, level.successor_token)
            if not epoch.holds or self.workers.all_stand():
                self.news.touch()
        self.saves.follow(level, published.seen.good)
        if epoch.arming.arm(level, current):
            self.news.touch()
        if self.me.id in level.leaving:
            self._leave(level)
        else:
            epoch.leaving.stay()
        if epoch.holds:
            self._hold(level)
        if level.stage is Stage.CUT:
            self._cut()
            self.workers.end_ranks(level.ended)
            order_save(level, self.workers.current.values(), time.monotonic())
            self.saves.look_for_copies(level.number)
        if not epoch.leaving.step:
            epoch.arming.answer(level, current)
        if level.stage is Stage.OVER:
            self.workers.end_current()

    def _leave(self, level: EpochLevel) -> None:
        now, current = time.monotonic(), list(self.workers.current.values())
        notice = self.holds.measure_notice(now)
        if self.epoch.leaving.may_end(level, current, now, notice):
            self.workers.end_current()

    def _hold(self, level: EpochLevel) -> None:
        self.workers.hold(level.number)
        self.workers.end_ranks(level.ended)
        order_held_save(level, self.workers.current.values())
        for worker in self.workers.current.values():
            if worker.rank == level.asked and worker.alive and not worker.asked_vector:
                worker.asked_vector = True
                worker.send(wire.GiveVector(epoch=level.number))

    def _cut(self) -> None:
        now = time.monotonic()
        if all(w.cut_at is None for w in self.workers.current.values()):
            self._seconds.cut(now)
        for worker in self.workers.current.values():
            self._rest(worker, now)
        self.workers.cut(self.epoch.number)

    # --- an epoch that goes on in place ----------------------------------------------------------

    def _join_in_place(self, level: EpochLevel | None) -> None:
        mine = self._joining.find_place(level)
        if level is None or mine is None or level.number < self.epoch.joined:
            self._joining.follow(level)
            return
        self._seconds.begin(time.monotonic(), restore=0.0, first=self.epoch.number == 0)
        entered = self._joining.enter(mine)
        self.deaths.entered_epoch()
        self.holds.entered_epoch()
        self._enter_in_place(level, mine)
        for worker in entered:
            self.parts.say_that_it_runs(worker)

    def _continue_in_place(self, level: EpochLevel) -> None:
        """Enter `level` with the local workers, if it continues their epoch in place."""
        mine = self.parts.find_place(level)
        cut = any(w.alive and w.cut_at is not None for w in self.workers.current.values())
        if mine is not None and level.number >= self.epoch.joined and not cut:
            self._enter_in_place(level, mine)

    def _enter_in_place(self, level: EpochLevel, mine: EpochMember) -> None:
        self.epoch.enter(level)
        self.epoch.join(level.number, level.token)
        self.book.rewind(level.resume)
        self.saves.continue_in(level)
        self.workers.continue_in(
            mine.lives, lambda worker: build_regroup(worker.local, level, mine)
        )

    # --- an epoch that starts from a checkpoint --------------------------------------------------

    def _wants_fresh(self, published: Levels) -> bool:
        if self.holds.holds_all(published, time.monotonic()):
            return False
        staying = self._list_staying()
        over = [local not in staying for local in range(self.settings.workers)]
        return is_fresh_wanted(published, self.me.slot, over)

    def _ensure_fresh(self) -> None:
        self.workers.ensure_fresh({*self.holds.held_locals, *self._list_staying()})

    def _list_staying(self) -> set[int]:
        """Local ranks whose worker continues."""
        current = self.workers.current.items()
        return {n for n, w in current if w.alive and w.cut_at is None and not w.asked}

    def _join(self, published: Levels) -> None:
        ready = self.workers.group_over() and self.workers.ready_lives()
        free = ready and not self.holds.held_locals
        if free and published.round > max(self.epoch.joined, self.epoch.number):
            self.epoch.join(published.round)
            self.news.touch()

    def _begin(self, published: Levels) -> None:
        level, epoch = published.epoch, self.epoch
        if level is None or not level.live or level.number <= epoch.number:
            return
        mine = level.member(*self.me.id)
        if mine is None or epoch.joined != level.number or self._restorer.epoch >= level.number:
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
        newest = self.epoch.newest_level
        if newest is None or newest.number != level.number or not newest.live:
            return False
        if self.workers.ready_lives() != mine.lives:
            self.news.touch()
            return False
        return True

    def _start(
        self, level: EpochLevel, mine: EpochMember, fetched: Fetched | None, restore: float
    ) -> None:
        self._seconds.begin(time.monotonic(), restore=restore, first=self.epoch.number == 0)
        self.epoch.enter(level)
        self._restorer.broken = None
        self.frames.forget_notes()
        self.book.rewind(level.resume)
        self.saves.enter(level.number, level.token)
        self.deaths.entered_epoch()
        self.holds.entered_epoch()
        self.workers.begin(
            lambda worker: build_start(self.settings, worker.local, level, mine, fetched)
        )
        self.news.touch()

    # --- what happens to workers -----------------------------------------------------------------

    def _death(self, worker: Worker) -> None:
        now, trained = time.monotonic(), self.epoch.trained
        self._rest(worker, now)
        if worker.epoch and worker.in_place:
            self.holds.lost(self.epoch.newest, now)
        if not worker.asked:
            self.deaths.died(worker, trained=trained, now=now)
            early = worker.epoch == 0 and self.deaths.died_early(worker, trained=trained)
            if early and not self.holds.ending:
                self._ensure_fresh()
        self._apply_again_and_report()

    def _rest(self, worker: Worker, now: float) -> None:
        """This rank no longer trains: from now on the agent accounts for its seconds."""
        seconds = self._seconds
        if worker.epoch == self.epoch.number and not seconds.rests(worker.local):
            seconds.page(worker.local, worker.life, worker.position())
            if worker.started_at is not None:
                in_order = worker.stays or worker.state is State.FINISHED
                spent, kind = now - worker.started_at, "idle" if in_order else "detect"
                seconds.tail(worker.local, worker.life, spent, kind)
            seconds.rest(worker.local, now)

    def _unsaved(self, staged: wire.Staged, rank: int) -> None:
        """Report a full-state save that failed, so that another rank can be asked to save."""
        for worker in self.workers.current.values():
            if worker.rank == rank and staged.whole:
                worker.unsaved, worker.whole = True, 0
                self.news.touch()

    def look(self, now: float) -> None:
        """Do what depends on time alone. Raises what a task has raised, so that the agent ends."""
        self.news.raise_failure()
        self._hang_watch.look(self.parts.limits, now, self.parts.node)
        for worker in self.workers.processes.find_stuck(now):
            self.deaths.survives_kill(worker)
            self.news.touch()
        self.deaths.memory.look(now)
        if self.holds.look(self.epoch.newest, now):
            self._apply_again_and_report()
        elif self.epoch.leaving.step:
            self._apply_again()

    def look_at_progress(self) -> float:
        """Look at the workers' progress. Returns the seconds until the next look."""
        return self._hang_watch.look_at_progress(self.parts.limits.step)

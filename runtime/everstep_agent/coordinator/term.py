"""One coordinator's term: the time from taking the role to giving it up, with the state and
resources it needs.

Gathering, training and recovering an epoch share it. They change the state only by its named
transitions (`term.change(term.state.…)`), and each change is published at once.
"""

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import TypeVar

from everstep_agent.checkpoint.commit import Committer
from everstep_agent.checkpoint.parts import Part
from everstep_agent.checkpoint.pin_rules import find_pinned
from everstep_agent.checkpoint.retention import Retention
from everstep_agent.context import Context
from everstep_agent.coordinator import (
    faults,
    incidents,
    members,
    rounds,
    seen_document,
    silence_rules,
    stalled_joins,
)
from everstep_agent.coordinator.awake_clock import AwakeClock
from everstep_agent.coordinator.background import Background
from everstep_agent.coordinator.hung import Patience
from everstep_agent.coordinator.post_commit import PostCommit, Saved
from everstep_agent.coordinator.publish import Board
from everstep_agent.coordinator.read_back import ReadBacks
from everstep_agent.coordinator.reports import Reports
from everstep_agent.coordinator.saves import Saves
from everstep_agent.coordinator.seen_document import NOTES
from everstep_agent.coordinator.silence import Silence
from everstep_agent.coordinator.spent_time import SpentTime
from everstep_agent.coordinator.state import JobState
from everstep_agent.coordinator.store_waits import StoreWaits
from everstep_agent.live_settings import apply_wanted
from everstep_agent.pace import Pace
from everstep_agent.peers.agent_report import AgentReport
from everstep_agent.peers.epoch_level import EpochLevel
from everstep_agent.peers.group_store import GroupStore
from everstep_agent.peers.messages import CoordinatorFault, End, Levels
from everstep_agent.runlog import rules as runlog_rules
from everstep_agent.waiting import happens
from everstep_contract import levels, log, report

T = TypeVar("T")
STALE_SECONDS = 5.0
TICK_SECONDS = 0.1
QUIET_TICK_SECONDS = 0.5
"""The same in a running epoch without news for a while."""


class Term:
    """A leadership term, as in Raft; several may run at once, and only the run log decides which
    one may write.

    `inherited`: the newest levels that this agent read from the former coordinator; `group`: the
    keys that this agent keeps for an epoch's process group, whichever agent coordinates;
    `lost`: addresses of coordinators that this agent has lost, and that have not answered since;
    `phase_since`: since when it has known of the open incident's present phase.
    """

    def __init__(
        self,
        context: Context,
        inherited: Levels | None,
        wanted: levels.Wanted,
        group: GroupStore,
        lost: Collection[str] = (),
        phase_since: float | None = None,
    ) -> None:
        self.id = secrets.token_hex(8)
        self.clock = AwakeClock()
        self._began = self.clock()
        self.context = context
        self.settings = apply_wanted(context.settings, wanted)
        """As currently in effect."""
        self.me, self.line = context.me, context.line
        self.run_log = context.run_log
        self.reports = Reports()
        self.group = group
        self.background = Background(self.line)
        self.claiming: asyncio.Task[None] | None = None
        """Appends the claims of the epoch that stepped first (`claim_behind.py`)."""
        self.store_waits = StoreWaits(self.line, lambda: self.epoch is None, self.publish)
        seen = inherited.seen if inherited else levels.Seen()
        self.saves = Saves(
            Committer(context.store, self.run_log, context.settings.run, context.memory),
            on_commit=self._committed,
            background=self.background,
            line=self.line,
        )
        if seen.committed is not None:
            self.saves.committed_at -= seen.committed.age_ms / 1000
        self._retention = Retention(context.store, self.run_log, keep=max(1, self.settings.keep))
        self._read_backs = ReadBacks(self.recent, self.publish, self.now)
        self.post_commit = PostCommit(
            self._retention,
            self._read_backs,
            good=seen.good,
            persist=self.store_waits.persist,
            is_calm=lambda: self.ended or self._state.incidents.current is None,
            line=self.line,
        )
        self.patience = Patience()
        self.silence = Silence(context.settings.token, self.reports.changed.set, lost)
        self.carried = SpentTime()
        """As of the checkpoint that was newest when this term began."""
        self._state = JobState(
            wanted=wanted,
            epoch=inherited.epoch if inherited else None,
            incidents=incidents.from_levels(seen.incidents, now=self.now(), since=phase_since),
            left=seen.left,
            faults=inherited.faults if inherited else (),
        )
        self.goes_on = inherited is not None and faults.may_go_on(inherited)
        self._pace = Pace(TICK_SECONDS, QUIET_TICK_SECONDS)
        self.board = Board(self._build_levels(seen), self._try_to_build_seen)

    def now(self) -> float:
        return self.clock()

    # --- the state -------------------------------------------------------------------------------

    @property
    def state(self) -> JobState:
        return self._state

    def change(self, state: JobState) -> None:
        self._state = state
        self.publish()
        self.post_commit.changed.fire()

    def publish(self) -> None:
        state, seen = self._state, self.board.levels.seen
        seen = replace(
            seen,
            left=state.left,
            stopped=state.stopped,
            step=seen.step if state.final_step is None else state.final_step,
            done=state.final_step is not None,
            failure=state.failure,
            incidents=state.incidents.levels(),
        )
        if self.board.publish(self._build_levels(seen)):
            self._pace.note_news()

    def _build_levels(self, seen: levels.Seen) -> Levels:
        state = self._state
        return Levels(
            coordinator=levels.SlotAttempt(slot=self.me.slot, attempt=self.me.attempt),
            address=self.me.address,
            round=state.round,
            claimed=self.run_log.index.oldest_living if self._epoch_in_log() else 0,
            epoch=state.epoch,
            unfinished=state.unfinished,
            read_back=self._read_backs.level,
            wanted=state.wanted,
            seen=seen,
            end=state.end,
            faults=state.faults,
        )

    @property
    def wanted(self) -> levels.Wanted:
        return self._state.wanted

    @property
    def epoch(self) -> EpochLevel | None:
        return self._state.epoch

    @property
    def running(self) -> EpochLevel:
        """The epoch, where there must be one."""
        assert self._state.epoch is not None
        return self._state.epoch

    @property
    def ended(self) -> bool:
        return self._state.end is not None

    # --- input from agents and operator
    # -------------------------------------------------------------

    # These run in the tasks of the HTTP server. A bug here must not break the server: it ends this
    # term instead.

    def take(self, found: AgentReport) -> None:
        with self._guarded():
            self.reports.take(found, self.now())
            self._read_backs.hear(found)
            self.silence.hear(found, self.now())
            for name, step in found.pins.items():
                self.saves.pins.ask([name], step, self.run_log.index)
            if self._state.incidents.resumed:
                self.reports.changed.set()  # the report may contain the first new step

    def add_part(self, part: Part) -> bool:
        """Returns False if the part has to be sent again: its epoch is not known here yet."""
        epoch = self._state.unfinished or self.epoch
        if epoch is None or part.epoch > epoch.number:
            return False
        with self._guarded():
            if part.epoch == epoch.number and part.step > epoch.committed:
                self.saves.add(part)
                self.reports.changed.set()
        return True

    def pump(self, applied: Mapping[int, int]) -> None:
        """Commit what the running epoch has saved, or have newer saves wait for it in memory."""
        self.saves.pump(self.running, applied, self.spent())
        backlog = self.saves.find_backlog(self.running)
        if backlog != self.running.backlog:
            self.line.say("uploads_wait" if backlog else "uploads_go_on", step=backlog)
            self.change(self._state.hold_uploads(backlog))

    def want(self, wanted: levels.Wanted) -> None:
        with self._guarded():
            self.settings = apply_wanted(self.context.settings, wanted)
            self._retention.keep = max(1, self.settings.keep)
            if wanted != self._state.wanted:
                self.change(self._state.want(wanted))
                self.reports.changed.set()

    def serve_seen(self) -> levels.Seen:
        """For the operator."""
        return self.board.serve_seen(self.now())

    def _try_to_build_seen(self) -> levels.Seen:
        with self._guarded():
            return self.build_seen()
        return self.board.levels.seen

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.background.fail(error)

    # --- what we know ----------------------------------------------------------------------------

    def recent(self) -> list[AgentReport]:
        """Reports of agents that are not silent."""
        return self.reports.recent(self.now(), STALE_SECONDS)

    def list_yields(self) -> tuple[levels.Yield, ...]:
        """As `silence_rules.list_yields`."""
        now = self.now()
        return silence_rules.list_yields(self.wanted, self.reports.aged(now), now - self._began)

    @property
    def behind(self) -> bool:
        """Whether an agent was in a newer epoch than this term knows of, and may hold the only copy
        of its state.
        """
        return rounds.is_behind(self.recent(), self.epoch, self.run_log.newest_claim)

    @property
    def may_hand_over(self) -> bool:
        """Whether another agent can continue the running epoch as it is, without this pod."""
        epoch, recovers = self.epoch, self._state.incidents.current is not None
        if not self.settings.in_place or epoch is None or recovers:
            return False
        outside = all((m.slot, m.attempt) != self.me.place for m in epoch.members)
        return outside and faults.may_continue(epoch)

    @property
    def hands_over(self) -> bool:
        return seen_document.hands_over(self.me.place, self._state.left, self.wanted, self.epoch)

    @property
    def why_over(self) -> str:
        """Why the pod that holds this role no longer belongs to the job; empty if it does."""
        return runlog_rules.why_pod_is_over(
            self.run_log.newest_claim, self.settings.job_uid, *self.me.place
        )

    def applied(self) -> dict[int, int]:
        return members.list_applied(self.epoch, self.reports.all()) if self.epoch else {}

    def spent(self) -> SpentTime:
        return self.carried.update(self.reports.all())

    def newest_commit(self) -> log.Commit | None:
        broken = self._state.broken
        return next((c for c in self.run_log.index.resumable() if c.manifest not in broken), None)

    def committed(self) -> levels.CheckpointRef | None:
        commit = self.newest_commit()
        if commit is None:
            return None
        age = round(self.saves.age * 1000)
        return levels.CheckpointRef(
            epoch=commit.epoch, step=commit.step, bytes=commit.bytes, age_ms=age
        )

    def list_unheard(self) -> frozenset[tuple[int, int]]:
        """Pods that may hold the state of an epoch that this term does not know of."""
        return rounds.list_unheard(
            self.run_log.newest_claim,
            self.epoch.number if self.epoch else 0,
            self.reports.all(),
            self.wanted,
            job_uid=self.settings.job_uid,
        )

    def _epoch_in_log(self) -> int:
        newest = self.run_log.newest_claim
        ours = newest is not None and newest.job_uid == self.settings.job_uid
        return newest.epoch if newest is not None and ours else 0

    def build_seen(self) -> levels.Seen:
        state = self._state
        facts = seen_document.Facts(
            run=self.settings.run,
            generation=seen_document.find_generation(self.wanted, self.epoch),
            epoch=self._epoch_in_log(),
            coordinator=levels.SlotAttempt(slot=self.me.slot, attempt=self.me.attempt),
            staged=self._staged(),
            committed=self.committed(),
            good=self.post_commit.good,
            pinned=find_pinned(self.wanted.pin, self.run_log.index),
            refused=self.saves.not_finite[1],
            spares=self._list_spares(),
            silent=self._list_silent(),
            yielded=silence_rules.list_left_out(
                self.wanted, self.run_log.newest_claim, self.settings.job_uid
            ),
            left=state.left,
            stopped=state.stopped,
            final_step=state.final_step,
            failure=state.failure,
            fenced=state.fenced,
            restarts=self.run_log.index.restarts(self.settings.job_uid),
            notes=(
                *state.notes,
                *self.post_commit.notes,
                *filter(None, (self.post_commit.blocked,)),
                *self.saves.notes,
                *faults.build_note(state.faults),
            ),
            not_joined=self._describe_failed_joins(),
            incidents=state.incidents.levels(),
            storage_error=self.storage_error,
            seconds=self.spent().total(),
        )
        heard = [(r, a) for r, a in self.reports.aged(self.now()) if a < STALE_SECONDS]
        return seen_document.build_seen(facts, self.epoch, heard)

    def _describe_failed_joins(self) -> tuple[str, ...]:
        if not self._state.failed_joins:
            return ()
        eligible = rounds.list_eligible(self.recent(), self.wanted)
        return stalled_joins.describe(self._state.failed_joins, {r.id[:2] for r in eligible})

    def _list_spares(self) -> tuple[levels.SlotAttempt, ...]:
        found = rounds.list_spares(self.epoch, self.recent(), self.wanted)
        waiting = stalled_joins.list_waiting(self._state.failed_joins, self.now())
        places = [r.id[:2] for r in found if r.id[:2] not in waiting]
        return tuple(levels.SlotAttempt(slot=slot, attempt=attempt) for slot, attempt in places)

    def _list_silent(self) -> tuple[levels.SlotAttempt, ...]:
        if self.epoch is None:
            return ()
        found = silence_rules.list_silent(self.epoch, self.reports.aged(self.now()))
        return tuple(levels.SlotAttempt(slot=s, attempt=a) for s, a, _ in sorted(found))

    def _staged(self) -> levels.CheckpointRef | None:
        step = self.staged
        return levels.CheckpointRef(epoch=self.running.number, step=step) if step else None

    @property
    def staged(self) -> int:
        """The newest step that all agents of the epoch have staged; 0: none."""
        return members.find_staged(self.epoch, self.reports.all()) if self.epoch else 0

    @property
    def storage_error(self) -> levels.StorageError | None:
        """The error for which this agent or another waits for the store."""
        if self.store_waits.trouble is not None:
            return self.store_waits.trouble
        if self.context.store.trouble is not None:
            return self.context.store.trouble.to_level()
        if self.saves.trouble is not None:
            return self.saves.trouble.level
        return next((r.storage_error for r in self.recent() if r.storage_error is not None), None)

    # --- actions that the phases share
    # --------------------------------------------------------------

    def note_left(self) -> None:
        self.change(
            self._state.note_left(
                seen_document.build_left(
                    self.wanted,
                    self.recent(),
                    self.epoch,
                    self.committed(),
                    self._state.left,
                    self.list_unheard(),
                    coordinator=None if self.may_hand_over else self.me.place,
                )
            )
        )

    def open_incident(self, cause: incidents.Cause, *, id: str = "") -> None:
        self.change(self._state.open_incident(id or self.new_incident(cause), cause, self.now()))

    def new_incident(self, cause: incidents.Cause) -> str:
        """The operator's id, if the operator has opened an incident that is not known here yet and that
        may have this cause; otherwise a new id.
        """
        given = self.wanted.incident
        known = self._state.incidents.is_known(given)
        if given and not known and self._state.may_be_operators(cause):
            return given
        return f"{self.settings.job.rpartition('/')[2]}-{secrets.token_hex(4)}"

    def mark(self, phase: str) -> None:
        self.change(self._state.mark(phase, self.now()))

    def end(self, cause: report.Cause, message: str, **fields: object) -> None:
        """Publishes the end, this coordinator's last document; `fields` are those of `End`."""
        commit = self.newest_commit()
        said = {
            "epoch": self.epoch.number if self.epoch else 0,
            "step": commit.step if commit else 0,
            **fields,
        }
        end = End(cause=cause.value, message=message, **said)  # type: ignore[arg-type]
        self.line.say("job_ends", cause=cause.value, step=end.step, message=message)
        self.change(self._state.finish(end))

    async def tick(self) -> None:
        """Waits until an agent reports something to act on, or for a short time."""
        self.reports.changed.clear()
        await happens(self.reports.changed, TICK_SECONDS)

    async def wait_for_news(self) -> None:
        """`tick`, less often in a quiet epoch."""
        self.reports.changed.clear()
        await self._pace.wait_for_news(self.reports.changed)

    async def persist(self, call: Callable[[], Awaitable[T]]) -> T:
        return await self.store_waits.persist(call)

    def lay_down(self, error: Exception) -> CoordinatorFault:
        """End this term after a fault. Its last document is built from what was published, not from
        state that may be at fault.
        """
        fault = faults.build_fault(self.me, error)
        last = self.board.levels
        known = (*last.faults, fault)
        seen = replace(last.seen, notes=(*last.seen.notes, *faults.build_note(known))[-NOTES:])
        end = None
        if len(known) > len(faults.REST_SECONDS):
            epoch, step = (last.epoch.number, last.epoch.committed) if last.epoch else (0, 0)
            end = faults.build_end(known, epoch=epoch, step=step)
            seen = replace(
                seen,
                failure=levels.Failure(cause=end.cause, message=end.message, step=step),
            )
        self._state = replace(self._state, faults=known, end=end)
        self.board.seal(replace(last, seen=seen, faults=known, laid_down=end is None, end=end))
        return fault

    def hand_over(self) -> None:
        """Publish this term's last document. The successor continues a running epoch as it is."""
        last = self._build_levels(self._try_to_build_seen())
        self.board.seal(replace(last, laid_down=self.may_hand_over))

    async def close(self) -> None:
        await self.saves.close()
        await self.silence.close()
        await self.background.close()
        if not self.board.levels.laid_down:
            self.group.open_epoch(0)

    def look_after(self, commit: log.Commit, uploaders: Mapping[str, int]) -> None:
        """Read the checkpoint back, then retire older ones, in the background."""
        saved = Saved(commit=commit, uploaders=uploaders)
        self.background.start(self.post_commit.look_after(saved))

    def _committed(self, commit: log.Commit, uploaders: Mapping[str, int]) -> None:
        self.change(self._state.commit(commit))
        self.look_after(commit, uploaders)
        self.reports.changed.set()

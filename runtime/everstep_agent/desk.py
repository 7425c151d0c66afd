"""The coordinator's desk: everything that gathering, training and recovering an epoch share, and
what is published from it.
"""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from everstep_agent import incidents, logline, rounds, runlog, runlog_rules, seeing
from everstep_agent.bulletin import Board, Reports
from everstep_agent.checkpoint.parts import Part
from everstep_agent.checkpoint.retention import Retention
from everstep_agent.groupstore import GroupStore
from everstep_agent.messages import AgentReport, End, EpochLevel, Levels, State
from everstep_agent.saving import Saves
from everstep_agent.signals import happens
from everstep_agent.storage.errors import StoreError
from everstep_agent.storage.retrying import Retrying
from everstep_agent.tending import Tending
from everstep_contract import env, levels, log, report

T = TypeVar("T")
STALE_SECONDS = 5.0
TICK_SECONDS = 0.1
STORE_PAUSE_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    slot: int
    attempt: int
    incarnation: int
    address: str

    @property
    def place(self) -> tuple[int, int]:
        return self.slot, self.attempt

    @property
    def id(self) -> tuple[int, int, int]:
        return self.slot, self.attempt, self.incarnation


class Desk:
    """Soft state only: what must outlive it stands in the run log or is reported again by the
    agents.
    """

    def __init__(
        self,
        *,
        settings: env.AgentEnv,
        me: Identity,
        store: Retrying,
        line: logline.Log,
        inherited: Levels | None,
        wanted: levels.Wanted,
    ) -> None:
        self.settings = settings
        self.me = me
        self.store = store
        self.line = line
        self.run_log = runlog.RunLog(store)
        self.reports = Reports()
        self.group = GroupStore()
        self.saves = Saves(store, self.run_log, settings.run, on_commit=self._committed, line=line)
        now = time.monotonic()
        seen = inherited.seen if inherited else levels.Seen()
        self.incidents = incidents.from_levels(seen.incidents, now=now)
        self.left = seen.left
        self.tending = Tending(
            Retention(store, self.run_log, keep=max(1, settings.keep)),
            good=seen.good,
            persist=self.persist,
            line=line,
        )
        self.committed_at = now
        self.burnt = 0
        self.struck = "", 0
        """Cause and step of the last failure."""
        self.broken: set[str] = set()
        self.notes: tuple[str, ...] = ()
        self.base_seconds: Mapping[str, float] = {}
        self.stopped: levels.Stopped | None = None
        self.done = False
        self.failure: levels.Failure | None = None
        self.fenced = ""
        self.over = ""
        """Why the pod that holds this role belongs to the job no more."""
        self._failed = logline.Once(line, "background_work_failed")
        self._waited: dict[logline.Once, levels.StorageError] = {}
        """What each call of `persist` waits out."""
        self.served_at = 0.0
        """When the operator was last given `seen`."""
        self.end_served = False
        """It has been given the end."""
        self.end_version = 0
        """Of the board, as it tells of the end; what changes later need not be read."""
        self.step_at = (0, now)
        self._tasks: set[asyncio.Task[None]] = set()
        place = levels.SlotAttempt(slot=me.slot, attempt=me.attempt)
        self.board = Board(
            Levels(
                coordinator=place,
                address=me.address,
                epoch=inherited.epoch if inherited else None,
                wanted=wanted,
                seen=seen,
            ),
            self.build_seen,
        )

    # --- what others tell us ---------------------------------------------------------------------

    def take(self, report_: AgentReport) -> None:
        self.reports.take(report_, time.monotonic())

    def add_part(self, part: Part) -> None:
        epoch = self.epoch
        if epoch is not None and part.epoch == epoch.number and part.step > epoch.committed:
            self.saves.add(part)
            self.reports.changed.set()

    def want(self, wanted: levels.Wanted) -> None:
        self.publish(wanted=wanted)
        self.reports.changed.set()

    # --- what we know ----------------------------------------------------------------------------

    @property
    def wanted(self) -> levels.Wanted:
        return self.board.levels.wanted

    @property
    def epoch(self) -> EpochLevel | None:
        return self.board.levels.epoch

    @property
    def behind(self) -> bool:
        """Somebody was in a newer epoch than we know of, and may hold what nobody else does."""
        known = self.epoch.number if self.epoch else 0
        return any(r.epoch > known for r in self.reports.recent(time.monotonic(), STALE_SECONDS))

    @property
    def hands_over(self) -> bool:
        return seeing.hands_over(self.me.place, self.left, self.wanted, self.epoch)

    @property
    def ended(self) -> bool:
        return self.board.levels.end is not None

    @property
    def gone(self) -> frozenset[tuple[int, int]]:
        """Pods of the epoch that no longer hold anything, by proof or by decision."""
        members = self.epoch.members if self.epoch else ()
        return frozenset(
            (m.slot, m.attempt)
            for m in members
            if rounds.is_gone(m.slot, m.attempt, self.wanted)
            or (rounds.current_attempt(m.slot, self.wanted) or 0) > m.attempt
            or any(
                (d.slot, d.attempt) == (m.slot, m.attempt) and d.incarnation >= m.incarnation
                for d in self.wanted.dead
            )
        )

    def applied(self) -> dict[int, int]:
        """Last applied step of each rank that still runs in the epoch."""
        epoch, found = self.epoch, {}
        for held in self.reports.all() if epoch else ():
            member = epoch.member(*held.id) if epoch else None
            if epoch is None or member is None or held.epoch != epoch.number:
                continue
            for worker in held.workers:
                if worker.state in (State.STARTED, State.TRACKED):
                    found[member.node_rank * len(member.lives) + worker.local] = worker.applied
        return found

    def newest_commit(self) -> log.Commit | None:
        commits = runlog_rules.list_resumable(self.run_log.entries)
        return next((c for c in commits if c.manifest not in self.broken), None)

    def seconds(self) -> dict[str, float]:
        total = dict(self.base_seconds)
        for held in self.reports.all():
            for name, spent in held.seconds.items():
                total[name] = total.get(name, 0.0) + spent
        return total

    def idle(self, now: float) -> float:
        """Seconds since any rank's step last advanced."""
        furthest = max(self.applied().values(), default=0)
        if furthest != self.step_at[0]:
            self.step_at = (furthest, now)
        return now - self.step_at[1]

    def build_seen(self) -> levels.Seen:
        now = time.monotonic()
        facts = seeing.Facts(
            run=self.settings.run,
            epoch=self._epoch_in_log(),
            coordinator=levels.SlotAttempt(slot=self.me.slot, attempt=self.me.attempt),
            staged=self._staged(),
            committed=self.committed_ref(now),
            good=self.tending.good,
            left=self.left,
            stopped=self.stopped,
            done=self.done,
            failure=self.failure,
            fenced=self.fenced,
            restarts=runlog_rules.count_restarts(self.run_log.entries, self.settings.job_uid),
            notes=(*self.notes, *self.tending.notes, *self.saves.notes),
            incidents=self.incidents.levels(),
            storage_error=self._storage_error(),
            seconds=self.seconds(),
        )
        recent = [(r, a) for r, a in self.reports.aged(now) if a < STALE_SECONDS]
        return seeing.build_seen(facts, self.epoch, recent)

    def serve_seen(self) -> levels.Seen:
        """For the operator."""
        self.served_at, self.end_served = time.monotonic(), self.ended
        return self.build_seen()

    def _epoch_in_log(self) -> int:
        newest = self.run_log.newest_claim
        ours = newest is not None and newest.job_uid == self.settings.job_uid
        return newest.epoch if newest is not None and ours else 0

    def committed_ref(self, now: float) -> levels.CheckpointRef | None:
        commit = self.newest_commit()
        if commit is None:
            return None
        age = round((now - self.committed_at) * 1000)
        return levels.CheckpointRef(
            epoch=commit.epoch, step=commit.step, bytes=commit.bytes, age_ms=age
        )

    def _staged(self) -> levels.CheckpointRef | None:
        epoch = self.epoch
        held = [r.staged for r in self.reports.all() if epoch and r.epoch == epoch.number]
        if epoch is None or not held or min(held) == 0:
            return None
        return levels.CheckpointRef(epoch=epoch.number, step=min(held))

    def _storage_error(self) -> levels.StorageError | None:
        waited = next(iter(self._waited.values()), None)
        if waited is not None:
            return waited
        if self.store.trouble is not None:
            return self.store.trouble.to_level()
        return self.saves.trouble.level if self.saves.trouble else None

    # --- what we publish -------------------------------------------------------------------------

    def publish(self, **changes: Any) -> None:
        self.board.publish(claimed=self._epoch_in_log(), **changes)

    def set_epoch(self, **changes: Any) -> EpochLevel:
        assert self.epoch is not None
        epoch = replace(self.epoch, **changes)
        self.publish(epoch=epoch)
        return epoch

    def note_left(self) -> None:
        now = time.monotonic()
        self.left = seeing.build_left(
            self.wanted,
            self.reports.recent(now, STALE_SECONDS),
            self.epoch,
            self.committed_ref(now),
            self.left,
            self.list_unheard(),
            coordinator=self.me.place,
        )
        self.publish()

    def list_unheard(self) -> frozenset[tuple[int, int]]:
        """Pods that may hold the state of an epoch of which we have not heard."""
        return rounds.list_unheard(
            self.run_log.newest_claim,
            self.epoch.number if self.epoch else 0,
            self.reports.all(),
            self.wanted,
            job_uid=self.settings.job_uid,
        )

    def end(self, cause: report.Cause, message: str, **fields: Any) -> None:
        """The last thing that this coordinator publishes."""
        step = fields.pop("step", None)
        rank = fields.get("rank")
        if step is None:
            commit = self.newest_commit()
            step = commit.step if commit else 0
        if cause is report.Cause.DONE:
            self.done = True
        elif cause is report.Cause.FENCED:
            self.fenced = message
        elif cause is not report.Cause.STOPPED:
            self.failure = levels.Failure(cause=cause.value, message=message, rank=rank, step=step)
        self.line.say("job_ends", cause=cause.value, step=step, message=message)
        number = self.epoch.number if self.epoch else 0
        self.publish(
            round=0,
            end=End(cause=cause.value, message=message, epoch=number, step=step, **fields),
        )
        self.end_version = self.board.levels.version

    # --- time and store --------------------------------------------------------------------------

    async def tick(self, seconds: float = TICK_SECONDS) -> None:
        """Until an agent reports something or a little time has passed."""
        self.reports.changed.clear()
        await happens(self.reports.changed, seconds)

    async def persist(self, call: Callable[[], Awaitable[T]]) -> T:
        """Try until the store answers.

        Raises what trying again will not mend, as long as there is no epoch: a start with wrong
        credentials ends at once. Later the workers may hold what nobody else does, and somebody
        may give rights or bucket back while they step on.
        """
        waits = logline.Once(self.line, "store_waits")
        try:
            while True:
                try:
                    answer = await call()
                except StoreError as error:
                    if not error.transient and self.epoch is None:
                        raise
                    self._waited[waits] = error.to_level()
                    waits.say(kind=error.kind, message=str(error))
                    self.publish()
                    await asyncio.sleep(STORE_PAUSE_SECONDS)
                else:
                    waits.passed()
                    return answer
        finally:
            self._waited.pop(waits, None)

    def new_incident(self) -> str:
        """The operator's, if it has begun to act; one that is over already does not come again."""
        given = self.wanted.incident
        if given and not self.incidents.is_known(given):
            return given
        return f"{self.settings.job.rpartition('/')[2]}-{secrets.token_hex(4)}"

    def background(self, work: Awaitable[None]) -> None:
        async def guarded() -> None:
            try:
                await work
            except StoreError as error:
                self._failed.say(kind=error.kind, message=str(error))
            else:
                self._failed.passed()

        task = asyncio.create_task(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        await self.saves.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.group.open_epoch(0)

    def _committed(self, commit: log.Commit) -> None:
        self.committed_at = time.monotonic()
        epoch = self.epoch
        if epoch is not None and epoch.number == commit.epoch and commit.step > epoch.committed:
            self._say_committed(commit)
        self.background(self.tending.look_after(commit))
        self.reports.changed.set()

    def _say_committed(self, commit: log.Commit) -> None:
        if self.epoch is not None and self.epoch.number == commit.epoch:
            self.set_epoch(committed=max(commit.step, self.epoch.committed))

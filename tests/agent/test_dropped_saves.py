"""A change of membership drops the saves that are not committed; others are made soon. The test makes up the reports
and the time.
"""

import itertools
from dataclasses import replace

import pytest

from agent.a_term import a_term
from agent.given import a_claim, a_worker, an_epoch, stepping, wanting
from everstep_agent.coordinator import boundary_turn, due_saves
from everstep_agent.coordinator.coordinator import Coordinator
from everstep_agent.coordinator.term import Term
from everstep_agent.coordinator.watch import Watch
from everstep_agent.peers.agent_report import WorkerReport
from everstep_agent.peers.epoch_level import InPlace, Stage
from everstep_agent.peers.group_store import GroupStore
from everstep_agent.peers.messages import Levels
from everstep_contract import levels
from everstep_contract.log import Commit

TURN = 0.5
STAGED_AFTER = 3.0
"""From the boundary at which the ranks save until all have staged that save."""
COMMITTED_AFTER = 5.0
"""The same until it is committed."""


class Job:
    """Two pods take a step each second, and save every 60 s."""

    def __init__(self, every: int = 60) -> None:
        self.now, self.saves, self.commits = 0.0, list[int](), list[float]()
        self.term: Term = a_term(wanting(2), in_place=1, save_every_seconds=every)
        self.term.clock = lambda: self.now  # type: ignore[assignment]
        self.term.change(self.term.state.begin_epoch(an_epoch(2)))
        self.watch = Watch.start(0.0)

    @property
    def applied(self) -> int:
        return int(self.now)

    @property
    def workers(self) -> list[WorkerReport]:
        return [a_worker(applied=self.applied), a_worker(applied=self.applied)]

    def take_turn(self) -> None:
        self.now += TURN
        self._save()
        epoch = self.term.running
        staged = max((step for step in self.saves if self.now >= step + STAGED_AFTER), default=0)
        for slot in (0, 1):
            told = stepping(slot, applied=self.applied)
            acked = epoch.boundary.step if epoch.boundary is not None else 0
            self.term.take(
                replace(told, epoch=epoch.number, in_place=True, acked=acked, staged=staged)
            )
        boundary_turn.settle(self.term, self.watch, self.workers, self.now)

    def _save(self) -> None:
        boundary = self.term.running.boundary
        if boundary is not None and boundary.confirmed and self.applied >= boundary.step:
            self.saves = list(dict.fromkeys([*self.saves, boundary.step]))
        for step in [s for s in self.saves if self.now >= s + COMMITTED_AFTER]:
            self.saves.remove(step)
            self.commits.append(self.now)
            saved = Commit(epoch=1, token="t", step=step, manifest="m", digest="d")
            self.term.change(self.term.state.commit(saved))

    def change_members(self) -> None:
        """As `train` does when a member is lost, or when one joins."""
        former = self.term.running
        unsaved = due_saves.is_any_uncommitted(self.term, self.watch, self.workers)
        place = InPlace(former=former.number, applied=self.applied, reductions=0)
        following = replace(former, number=former.number + 1, boundary=None, in_place=place)
        self.term.change(self.term.state.begin_epoch(following))
        self.saves = []
        self.watch = self.watch.renew(self.now)
        if unsaved:
            self.watch.note_dropped(former.committed, self.now)

    def play(self, until: float, changes: list[float]) -> None:
        while self.now < until:
            self.take_turn()
            if self.now in changes:
                self.change_members()


async def test_in_a_storm_a_save_is_committed_whenever_the_members_stay_for_long_enough() -> None:
    """A member is lost every 15 s, and is back 5 s later. Each save by the clock falls into these 5 s at first."""
    job = Job()
    changes = sorted(at for lost in range(15, 601, 15) for at in (float(lost), lost + 5.0))
    job.play(600.0, changes)
    longest = max(b - a for a, b in itertools.pairwise([0.0, *job.commits, 600.0]))
    assert longest <= 60 + due_saves.RESTLESS_SECONDS + 15 + COMMITTED_AFTER
    await job.term.close()


@pytest.mark.parametrize("lost_at", [3.5, 5.0], ids=["before all have staged it", "after that"])
async def test_a_save_that_the_ranks_have_gone_past_is_made_again(lost_at: float) -> None:
    job = Job(every=1000)
    job.watch.save_at = -1000.0
    job.play(lost_at, [])
    assert job.saves == [1]
    assert job.term.running.boundary is None
    job.change_members()
    job.play(lost_at + due_saves.DROPPED_SECONDS + COMMITTED_AFTER + 3, [])
    assert len(job.commits) == 1
    await job.term.close()


# --- another coordinator takes over ---------------------------------------------------------------

NOW = 1000.0


def taken_over(
    committed: int, resume: int, *, age: float = 50.0, **settings: object
) -> tuple[Term, Watch]:
    """A term, and its watch, of a coordinator that has taken over. Its predecessor knew of the commit of step
    `committed`, and the survivors go on after step `resume`.
    """
    place = InPlace(former=1, applied=resume, reductions=0)
    known = levels.CheckpointRef(epoch=1, step=committed, age_ms=round(age * 1000))
    inherited = Levels(
        coordinator=levels.SlotAttempt(slot=1, attempt=0),
        address="host-1:7070",
        epoch=an_epoch(2, number=2, in_place=place, committed=committed),
        seen=levels.Seen(committed=known if committed else None),
    )
    term = a_term(wanting(2), inherited=inherited, in_place=1, **settings)
    return term, due_saves.start_watch(term, NOW)


@pytest.mark.parametrize(("committed", "due"), [(5, [False, True]), (0, [True, True])])
async def test_the_interval_between_saves_does_not_begin_again(
    committed: int, due: list[bool]
) -> None:
    """If nothing was ever committed, nobody knows for how long, so a save is due at once."""
    term, watch = taken_over(committed, 9, save_every_seconds=60)
    assert [due_saves.is_save_due(term, watch, NOW + after) for after in (5.0, 11.0)] == due
    await term.close()


async def test_the_interval_begins_with_an_epoch_in_which_all_start_from_a_checkpoint() -> None:
    term, _ = taken_over(5, 9, save_every_seconds=60)
    term.change(term.state.begin_epoch(an_epoch(2, stage=Stage.STARTING, committed=5)))
    watch = due_saves.start_watch(term, NOW)
    assert not due_saves.is_save_due(term, watch, NOW + 59.0)
    assert due_saves.is_save_due(term, watch, NOW + 60.0)
    await term.close()


@pytest.mark.parametrize(("resume", "due"), [(120, True), (99, False)])
async def test_a_save_that_the_predecessor_had_not_committed_is_made_again(
    resume: int, due: bool
) -> None:
    term, watch = taken_over(50, resume, save_every_steps=50)
    after = NOW + due_saves.DROPPED_SECONDS
    assert due_saves.is_dropped_due(term, watch, [a_worker(applied=resume)], after) == due
    await term.close()


async def test_a_near_save_is_made_at_once_because_those_of_the_former_epoch_are_dropped() -> None:
    _, watch = taken_over(5, 9)
    assert watch.near.is_due(30.0, NOW)


@pytest.mark.parametrize(("newest", "age"), [(5, 50.0), (7, 0.0)], ids=["known", "made since"])
async def test_the_age_of_the_newest_checkpoint_counts_on(newest: int, age: float) -> None:
    """When a commit was made that the predecessor did not tell of is not known: later than the one that it told of."""
    term, _ = taken_over(5, 9)
    assert await term.run_log.append(a_claim(1, job_uid="uid"))
    saved = Commit(epoch=1, token="token-1", step=newest, manifest="m", digest="d")
    assert await term.run_log.append(saved)
    good = levels.CheckpointRef(epoch=1, step=newest)
    told = term.board.levels
    inherited = replace(told, seen=replace(told.seen, good=good))
    coordinator = Coordinator(term.context, inherited, wanting(2), GroupStore())
    await coordinator._take_over()
    found = coordinator.term.committed()
    assert found is not None
    assert found.step == newest
    assert found.age_ms == pytest.approx(age * 1000, abs=20_000)
    await coordinator.close()
    await term.close()

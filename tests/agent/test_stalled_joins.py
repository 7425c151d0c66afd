"""A newcomer that cannot take over the state is invited again after pauses that grow. The test makes up the reports and
the time.
"""

import asyncio
from dataclasses import replace

import pytest

from agent.a_term import a_term
from agent.given import a_claim, a_member, a_report, a_worker, an_epoch, ended, wanting
from everstep_agent.coordinator import boundary_turn, join, stalled_joins
from everstep_agent.coordinator.stalled_joins import PAUSE_SECONDS
from everstep_agent.coordinator.transfer_rules import STILL_SECONDS
from everstep_agent.coordinator.watch import Watch
from everstep_agent.peers.agent_report import AgentReport, State
from everstep_agent.peers.epoch_level import Boundary, EpochLevel
from everstep_contract import levels
from everstep_contract.units import ONE_RANK, Mesh
from everstep_contract.wire import Standing

STEP = 5
"""All members have applied this step, and hold there when newcomers join."""
WHY = "a worker of slot 2 has ended"


class Job:
    """A coordinator's term. Slots 0 and 1 train, and others may join."""

    def __init__(self, want: int, mesh: Mesh = ONE_RANK) -> None:
        self.now = 1000.0
        self.term = a_term(wanting(want), in_place=1, mesh=mesh)
        self.term.clock = lambda: self.now  # type: ignore[assignment]
        self.mesh = mesh
        self.watch = Watch.start(self.now)
        self.outside: dict[int, AgentReport] = {}
        """The newest reports of the pods that are no members, by slot."""
        self.givers: list[int] = []
        """The rank that sent the state to the first newcomer, of each try."""

    async def open(self) -> None:
        epoch = an_epoch(2, mesh=self.mesh)
        members = tuple(i for m in epoch.members for i in m.ids())
        assert await self.term.run_log.append(a_claim(1, token=epoch.token, members=members))
        self.begin(epoch)

    def begin(self, epoch: EpochLevel) -> None:
        self.term.change(self.term.state.begin_epoch(epoch).run_epoch())
        self.watch = self.watch.renew(self.now)

    # --- what the agents report ------------------------------------------------------------------

    def wait(self, slot: int, attempt: int = 0) -> None:
        """The pod's worker waits to join."""
        self.outside[slot] = a_report(slot, attempt=attempt, in_place=True, fresh=(3,))

    def change(self, slot: int, **changes: object) -> None:
        self.outside[slot] = replace(self.outside[slot], **changes)  # type: ignore[arg-type]

    def hear(self, *, holds: bool = False, dead: int | None = None) -> None:
        """Receive a report from each agent. `dead`: a member that has lost its rank."""
        epoch = self.term.running
        standing = Standing(epoch=epoch.number, applied=STEP, reductions=0) if holds else None
        for member in epoch.members:
            state = State.HELD if holds else State.TRACKED
            worker = a_worker(
                life=member.lives[0],
                state=State.DEAD if member.slot == dead else state,
                standing=standing,
            )
            told = a_report(member.slot, epoch=epoch.number, fresh=(), workers=(worker,), until=100)
            joined = epoch.successor or epoch.number
            self.term.take(replace(told, attempt=member.attempt, in_place=True, joined=joined))
        for told in self.outside.values():
            self.term.take(told)

    # --- what the coordinator does ---------------------------------------------------------------

    def look(self) -> list[int]:
        """Take a turn. Returns the slots that are invited then."""
        self.hear()
        boundary_turn.settle(self.term, self.watch, [a_worker(), a_worker()], self.now)
        return [m.slot for m in self.term.running.joining]

    async def hold(self, *taken: int) -> "asyncio.Task[None]":
        """The members hold for the newcomers that are invited, of which these get the state at once."""
        for m in self.term.running.joining:
            step = STEP if m.slot in taken else None
            self.change(m.slot, fresh=(), prepared=m.lives, taken=step)
        self.term.change(self.term.state.arm(Boundary(step=STEP, hold=True, confirmed=True)))
        self.hear(holds=True)
        admitting = asyncio.create_task(join.admit(self.term))
        await asyncio.sleep(0)
        assert self.term.running.transfers
        self.givers.append(self.term.running.transfers[0].giver)
        return admitting

    async def end(self, admitting: "asyncio.Task[None]", *outside: int) -> None:
        """The next epoch begins. These pods are not in it, and have a worker that waits again."""
        former = self.term.running.number
        async with asyncio.timeout(10):
            await admitting
        assert self.term.running.number == former + 1
        for slot in outside:
            self.wait(slot, self.outside[slot].attempt)
        for member in self.term.running.members:
            self.outside.pop(member.slot, None)
        self.term.change(self.term.state.run_epoch())
        self.watch = self.watch.renew(self.now)

    async def stall(self, slot: int) -> None:
        """This pod is invited, and its transfer stalls."""
        assert slot in [m.slot for m in self.term.running.joining]
        admitting = await self.hold()
        self.now += STILL_SECONDS + 1
        self.hear(holds=True)
        await self.end(admitting, slot)

    async def admit(self, slot: int) -> None:
        """This pod is invited, and joins."""
        admitting = await self.hold(slot)
        self.hear(holds=True)
        await self.end(admitting)
        assert slot in [m.slot for m in self.term.running.members]

    @property
    def notes(self) -> list[str]:
        return [n for n in self.term.build_seen().notes if levels.POD_NOTE.match(n)]

    @property
    def spares(self) -> list[int]:
        return [spare.slot for spare in self.term.build_seen().spares]

    @property
    def causes(self) -> list[str]:
        return [c.cause for c in self.term.run_log.claims[1:]]

    @property
    def failed(self) -> dict[tuple[int, int], int]:
        return {pod: joins.count for pod, joins in self.term.state.failed_joins.items()}


@pytest.fixture
async def job() -> Job:
    made = Job(want=3)
    await made.open()
    return made


async def stall_twice(job: Job, slot: int = 2) -> None:
    for _ in range(2):
        assert job.look() == [slot]
        await job.stall(slot)


async def test_the_pauses_between_its_tries_grow(job: Job) -> None:
    job.wait(2)
    for pause in (0.0, 30.0, 120.0, 600.0, 600.0):
        assert job.look() == [2]
        await job.stall(2)
        if pause:
            assert job.look() == []
            job.now += pause - 1
            assert job.look() == []
            job.now += 1
    assert job.look() == [2]
    assert job.causes == ["GrowFailed"] * 5
    await job.term.close()


async def test_another_rank_sends_the_state_from_the_third_try_on(job: Job) -> None:
    job.wait(2)
    await stall_twice(job)
    job.now += 30
    assert job.look() == [2]
    await job.stall(2)
    assert job.givers == [0, 0, 1]
    await job.term.close()


async def test_the_next_attempt_of_its_slot_is_invited_at_once(job: Job) -> None:
    job.wait(2)
    await stall_twice(job)
    assert job.look() == []
    job.wait(2, attempt=1)
    assert job.look() == [2]
    assert job.notes == []
    await job.stall(2)
    assert job.failed == {(2, 1): 1}
    assert job.look() == [2]
    await job.term.close()


async def test_a_join_that_succeeds_makes_its_failures_forgotten(job: Job) -> None:
    job.wait(2)
    await stall_twice(job)
    job.now += PAUSE_SECONDS[1]
    assert job.look() == [2]
    await job.admit(2)
    assert job.failed == {}
    assert job.causes == ["GrowFailed", "GrowFailed", "Grow"]
    job.begin(an_epoch(2, number=job.term.running.number))
    job.wait(2)
    assert job.look() == [2]
    await job.stall(2)
    assert job.look() == [2]
    await job.term.close()


async def test_a_member_is_forgotten_once_it_has_all_its_ranks_again(job: Job) -> None:
    state = job.term.state.note_failed_joins({(1, 0, 1): WHY}, job.now)
    part, whole = (an_epoch(1, members=(a_member(1, lives=lives),)) for lives in ((1, 0), (1, 3)))
    assert state.begin_epoch(part).failed_joins
    assert not state.begin_epoch(whole).failed_joins
    await job.term.close()


async def test_a_spare_joins_meanwhile(job: Job) -> None:
    job.wait(2)
    job.wait(3)
    await stall_twice(job)
    assert job.look() == [3]
    await job.admit(3)
    job.now += PAUSE_SECONDS[-1]
    assert job.look() == [], "the job has its size"
    await job.term.close()


async def test_the_status_says_why_until_it_has_joined(job: Job) -> None:
    job.wait(2)
    assert job.look() == [2]
    await job.stall(2)
    assert job.look() == [2]
    assert job.notes == [], "a single failure needs nobody's attention"
    await job.stall(2)
    job.look()
    (note,) = job.notes
    assert "2 times in a row, the last time because slot 2 has 0 MiB of the state" in note
    assert "invites it again 30 s after" in note
    assert "Check its log, its node, and the network" in note
    job.now += PAUSE_SECONDS[1]
    assert job.look() == [2]
    assert job.notes == [note]
    await job.admit(2)
    job.look()
    assert job.notes == []
    await job.term.close()


async def test_a_pod_that_waits_is_no_spare_that_is_ready(job: Job) -> None:
    job.wait(2)
    job.wait(3)
    await stall_twice(job)
    assert job.look() == [3]
    await job.admit(3)
    job.hear()
    assert job.spares == []
    job.now += PAUSE_SECONDS[1]
    job.hear()
    assert job.spares == [2]
    await job.term.close()


async def test_a_pod_that_is_not_there_is_not_mentioned(job: Job) -> None:
    job.wait(2)
    await stall_twice(job)
    job.look()
    assert len(job.notes) == 1
    job.outside.clear()
    job.now += 60.0
    job.hear()
    assert job.notes == []
    await job.term.close()


@pytest.mark.parametrize("taken", [(), (2,)], ids=["before it has the state", "after that"])
async def test_a_newcomer_that_dies_while_the_members_hold_has_failed_too(
    job: Job, taken: tuple[int, ...]
) -> None:
    job.wait(2)
    assert job.look() == [2]
    admitting = await job.hold(*taken)
    job.change(2, prepared=(), taken=None, ended=ended(3))
    job.hear(holds=True)
    await job.end(admitting, 2)
    assert job.failed == {(2, 0): 1}
    assert job.causes == ["GrowFailed"]
    await job.term.close()


async def test_the_loss_of_a_member_is_no_fault_of_the_newcomer(job: Job) -> None:
    job.wait(2)
    assert job.look() == [2]
    admitting = await job.hold()
    job.now += STILL_SECONDS + 1
    job.hear(holds=True, dead=1)
    async with asyncio.timeout(10):
        await admitting
    assert job.term.running.number == 1, "the loss is handled first"
    assert job.failed == {}
    await job.term.close()


async def test_the_neighbour_of_a_pod_that_stalls_has_not_failed_and_joins_with_another() -> None:
    job = Job(want=4, mesh=Mesh(shard=2))
    await job.open()
    for slot in (2, 3):
        job.wait(slot)
    for _ in range(2):
        assert job.look() == [2, 3]
        admitting = await job.hold(2)
        job.now += STILL_SECONDS + 1
        job.hear(holds=True)
        await job.end(admitting, 2, 3)
    assert job.failed == {(3, 0): 2}
    assert job.look() == []
    job.wait(4)
    assert job.look() == [2, 4], "nobody waits for slot 3"
    await job.term.close()


def test_the_failures_of_former_attempts_are_dropped() -> None:
    found: dict[stalled_joins.Pod, stalled_joins.FailedJoins] = {}
    for attempt in range(3):
        found = stalled_joins.note(found, {(2, attempt, 1): WHY, (3, 0, attempt): WHY}, 10.0)
    assert {pod: joins.count for pod, joins in found.items()} == {(2, 2): 1, (3, 0): 3}

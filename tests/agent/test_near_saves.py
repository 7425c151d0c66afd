"""Saves that stay in memory, for a loss that leaves no whole copy of the model."""

import os
import signal
from pathlib import Path

import pytest

from agent.gang import Gang, assert_exact
from everstep_agent.checkpoint.unsent import NAME
from everstep_agent.coordinator.near_saves import (
    COPY_FACTOR,
    STAGE_FACTOR,
    NearSaves,
    is_save_near,
    is_wanted,
)
from everstep_agent.peers.epoch_level import EpochLevel, EpochMember, Stage
from everstep_contract.units import ONE_RANK, Mesh

SHARD = Mesh(shard=2)
LIMIT = 30.0


# --- when one is made -----------------------------------------------------------------------------


def an_epoch(ranks: int, mesh: Mesh, stage: Stage = Stage.RUNNING) -> EpochLevel:
    member = EpochMember(
        slot=0, attempt=0, incarnation=1, node_rank=0, first=0, lives=(1,) * ranks, address=""
    )
    return EpochLevel(number=1, token="t", stage=stage, members=(member,), mesh=mesh)


def test_they_are_made_where_one_loss_can_take_the_last_copy() -> None:
    assert is_wanted(an_epoch(2, SHARD), LIMIT)
    assert is_wanted(an_epoch(4, SHARD), LIMIT)
    assert is_wanted(an_epoch(1, ONE_RANK), LIMIT)
    assert not is_wanted(an_epoch(2, ONE_RANK), LIMIT), "the other rank has a whole copy"
    assert not is_wanted(an_epoch(2, SHARD), 0)
    assert not is_wanted(an_epoch(2, SHARD, Stage.STARTING), LIMIT)


def test_none_is_made_just_before_a_save_at_an_interval_of_steps() -> None:
    assert [step for step in range(100, 121) if is_save_near(step, 20)] == [100, 117, 118, 119, 120]
    assert not is_save_near(7, 0)


class Clocked:
    """Near saves of a job on a clock that only the test moves."""

    def __init__(self) -> None:
        self.now, self.stalled = 100.0, 0.0
        self.saves = NearSaves(made_at=self.now)

    def is_due(self) -> bool:
        return self.saves.is_due(LIMIT, self.now)

    def arm(self, step: int) -> None:
        self.saves.arm(step, self.stalled, self.now)

    def follow(self, held: int, copied: int | None = None) -> int:
        return self.saves.follow(
            held, copied, stalled=lambda: self.stalled, limit=LIMIT, now=self.now
        )

    def find_next(self) -> float:
        """Move the clock until the next one is due; return the seconds."""
        began = self.now
        while not self.is_due():
            self.now += 0.5
        return self.now - began


def test_what_a_loss_goes_back_to_is_never_older_than_the_limit() -> None:
    job = Clocked()
    assert job.find_next() == 30
    job.arm(7)
    job.now += 4
    assert not job.is_due(), "one is in progress"
    assert job.follow(7) == 7
    assert job.find_next() == 22, "30 s less 4 s of age and 4 s for the next save"


def test_one_that_takes_long_is_made_half_as_often_at_most() -> None:
    job = Clocked()
    job.arm(7)
    job.now += 40
    job.follow(7)
    assert job.is_due()
    job.arm(9)
    job.follow(9)
    assert job.find_next() == 30


def test_it_costs_a_hundredth_of_the_time_at_most() -> None:
    job = Clocked()
    job.arm(7)
    job.stalled = 0.5
    job.follow(7)
    assert job.find_next() == 50


def test_it_is_kept_once_it_lies_in_the_partners_memory_too() -> None:
    job = Clocked()
    job.arm(7)
    assert job.follow(7, copied=3) == 0
    assert job.follow(7, copied=7) == 7
    job.arm(9)
    assert job.follow(9, copied=7) == 7
    job.now += COPY_FACTOR * LIMIT
    assert job.follow(9, copied=7) == 9, "the wait for copies has a limit"


def test_one_that_a_pod_had_no_room_for_is_soon_made_again() -> None:
    """Nobody reports that: the one before it is still there, or was dropped at a loss."""
    job = Clocked()
    job.saves = job.saves.renew()
    job.arm(7)
    assert job.find_next() == STAGE_FACTOR * LIMIT
    job.arm(9)
    job.follow(9, copied=7)
    assert job.find_next() == COPY_FACTOR * LIMIT, "it waits for its copy only"


def test_what_the_former_epoch_kept_is_gone_so_the_next_is_due_at_once() -> None:
    job = Clocked()
    job.arm(7)
    job.follow(7)
    job.saves = job.saves.renew()
    assert job.is_due()
    assert job.follow(0) == 0


# --- a whole job ----------------------------------------------------------------------------------


def a_gang(folder: Path, **settings: object) -> Gang:
    """One unit of two pods. Only its last save is always uploaded; the near saves stay in memory."""
    gang = Gang(folder, 2, mesh=SHARD, max_redo_seconds=0.4, **settings)
    gang.stub |= {"STUB_UNTIL": "48", "STUB_STEP_MS": "50"}
    return gang


async def until_kept(gang: Gang, step: int) -> None:
    await gang.until(lambda s: s.kept_step >= step and s.copied_step >= step)


async def assert_continued(gang: Gang, least: int) -> None:
    """The job continued from a near save of step `least` or later, and the store had nothing before.
    An older near save may be committed first.
    """
    await gang.until(lambda s: s.epoch >= 2 and s.running)
    run_log = await gang.run_log()
    first, claims = run_log.commits[0], run_log.claims
    assert (first.epoch, first.token) == (1, claims[0].token)
    assert first.step >= least
    resumed = [c.step for c in run_log.commits if c.token == first.token][-1]
    assert [(link.epoch, link.last_step) for link in claims[1].chain] == [(1, resumed)]
    assert all(set(a.pod.restored_from) <= {"memory", "peer"} for a in gang.agents.values())
    await gang.reports()
    await assert_exact(gang, 48)


def list_stored(gang: Gang) -> list[Path]:
    return [p for p in (gang.tmp / "store").rglob("*") if p.is_file() and "chunks" in p.parts]


async def test_a_killed_rank_of_the_only_unit_costs_the_steps_since_the_last_near_save(
    tmp_path: Path,
) -> None:
    async with a_gang(tmp_path) as gang:
        await until_kept(gang, 8)
        assert not list_stored(gang), "a near save is not sent to the store"
        for slot in (0, 1):
            held = list((tmp_path / f"m-uid-1-{slot}-0/staging").glob(f"*{NAME}"))
            assert 1 <= len(held) <= 3, "older near saves must be dropped"
        os.kill(gang.worker(1), signal.SIGKILL)
        await assert_continued(gang, 8)
        (incident,) = gang.seen.incidents
        assert 0 <= incident.steps_lost < 40


async def test_a_lost_pods_part_is_uploaded_from_its_copy(tmp_path: Path) -> None:
    async with a_gang(tmp_path) as gang:
        await until_kept(gang, 8)
        await gang.kill(1)
        await gang.start(1, 1)
        await assert_continued(gang, 8)


async def test_agents_that_are_killed_too_find_it_when_they_come_back(tmp_path: Path) -> None:
    async with a_gang(tmp_path) as gang:
        await until_kept(gang, 8)
        for slot in (0, 1):
            await gang.kill(slot, say=False)
        for slot in (0, 1):
            await gang.start(slot, 0)
        await assert_continued(gang, 8)


async def test_a_pod_whose_container_ended_finds_its_part_when_it_comes_back(
    tmp_path: Path,
) -> None:
    """No other pod has a copy of its part, so at first the run seems to go back to its beginning."""
    async with a_gang(tmp_path, peer_bandwidth=0) as gang:
        await gang.until(lambda s: s.kept_step >= 8)
        await gang.kill(1)
        await gang.until(lambda s: any("going back to step 0" in note for note in s.notes))
        await gang.start(1, 0)
        await assert_continued(gang, 8)
        (incident,) = gang.seen.incidents
        assert incident.step >= 8
        assert incident.steps_lost < 8


@pytest.mark.parametrize("limit", [0.0, 3600.0])
async def test_without_one_the_loss_goes_back_to_the_commit(tmp_path: Path, limit: float) -> None:
    async with Gang(tmp_path, 2, mesh=SHARD, save_every_steps=6, max_redo_seconds=limit) as gang:
        await gang.until(lambda s: s.committed and s.committed.step >= 6)
        os.kill(gang.worker(1), signal.SIGKILL)
        await gang.reports()
        await assert_exact(gang, 20)

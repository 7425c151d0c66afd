"""Units of two ranks, with real agents and stub workers: who saves after a loss, and who continues."""

import os
import signal
from pathlib import Path

import pytest

from agent.gang import Gang, assert_exact, die_between_two_steps, stop_while_it_computes
from agent.stub_worker import LENGTH
from everstep_agent.checkpoint.manifests import fetch_manifest
from everstep_contract import levels
from everstep_contract.log import Commit
from everstep_contract.manifest import Manifest
from everstep_contract.units import Mesh

PAIRS = Mesh(shard=2)


def pairs(tmp_path: Path, pods: int = 4, **settings: object) -> Gang:
    return Gang(tmp_path, pods, mesh=PAIRS, **settings)


async def read(gang: Gang, commit: Commit) -> Manifest:
    return await fetch_manifest(gang.store(), commit)


def boxes(found: Manifest) -> list[tuple[int, int]]:
    return [(p.offsets[0], p.lengths[0]) for p in found.tensors[0].pieces]


HALVES = [(0, LENGTH // 2), (LENGTH // 2, LENGTH // 2)]


async def test_the_unit_that_survives_saves_both_its_parts_as_one_commit_and_no_step_is_lost(
    tmp_path: Path,
) -> None:
    async with pairs(tmp_path) as gang:
        await gang.until(lambda s: s.step >= 5)
        await die_between_two_steps(gang, 1)
        seen = await gang.until(lambda s: s.incidents and not s.incidents[-1].open)
        incident = seen.incidents[-1]
        assert (incident.rung, incident.rank, incident.steps_lost) == ("restart", 1, 0)
        assert "event=post_mortem_save" in gang.shown()
        assert "rank=2,3" in gang.shown()
        await gang.reports()
        (saved, *_), (first, second) = (
            (await gang.run_log()).commits,
            (await gang.run_log()).claims,
        )
        assert (saved.epoch, saved.step) == (1, incident.step)
        assert [(link.epoch, link.last_step) for link in second.chain] == [(1, saved.step)]
        assert [m.slot for m in second.members] == [m.slot for m in first.members]
        found = await read(gang, saved)
        assert (found.world, boxes(found)) == (4, HALVES), "one unit must save the whole state"
        await assert_exact(gang, 20)


async def test_if_no_unit_is_whole_all_go_back_to_the_newest_commit_and_it_is_told(
    tmp_path: Path,
) -> None:
    gang = pairs(tmp_path, save_every_steps=11)
    gang.stub |= {"STUB_UNTIL": "20", "STUB_STEP_MS": "100"}
    async with gang:
        await gang.until(lambda s: s.running)
        dying = gang.agents[1].pod.workers.current[0]
        await gang.until(lambda _: dying.position().applied >= 13)
        await stop_while_it_computes(dying)  # from now on nobody can complete a step
        await gang.until(lambda s: s.committed and s.committed.step == 11)
        for slot in (1, 2):
            os.kill(gang.worker(slot), signal.SIGKILL)
        seen = await gang.until(lambda s: s.incidents and not s.incidents[-1].open)
        incident = seen.incidents[-1]
        assert (incident.step, incident.steps_lost > 0) == (11, True)
        told = "unit 0 lost rank 1 (slot 1), unit 1 lost rank 2 (slot 2); no unit is whole"
        assert f"{told}; going back to step 11" in seen.notes
        await gang.reports()
        chain = (await gang.run_log()).claims[1].chain
        assert [(link.epoch, link.last_step) for link in chain] == [(1, 11)]
        await assert_exact(gang, 20)


@pytest.mark.parametrize("how", ["dies", "short"])
async def test_if_a_rank_cannot_save_the_next_unit_does(tmp_path: Path, how: str) -> None:
    gang = pairs(tmp_path, 6)
    gang.stub["STUB_MODE"] = f"save:{how}:{tmp_path}/flag"
    async with gang:
        await gang.until(lambda s: s.step >= 3)
        await die_between_two_steps(gang, 5)
        seen = await gang.until(lambda s: s.incidents and not s.incidents[-1].open)
        assert (tmp_path / "flag").exists()
        assert "rank=2,3" in gang.shown()
        assert seen.incidents[-1].steps_lost == 0
        await gang.reports()
        assert boxes(await read(gang, (await gang.run_log()).commits[0])) == HALVES
        await assert_exact(gang, 20)


async def test_a_pod_may_hold_a_unit(tmp_path: Path) -> None:
    async with pairs(tmp_path, 2, workers=2) as gang:
        await gang.until(lambda s: s.step >= 3)
        await die_between_two_steps(gang, 0)
        seen = await gang.until(lambda s: s.incidents and not s.incidents[-1].open)
        assert seen.incidents[-1].steps_lost == 0
        assert "rank=2,3" in gang.shown()
        await gang.reports()
        await assert_exact(gang, 20)


SOON = levels.JobSettings(gang_seconds=0.2)
"""Lets the job start smaller at once. Not for a start with all four pods: the first ones ready would train alone."""


async def stop(gang: Gang) -> None:
    stopped = await gang.suspend()
    assert all(i.steps_lost == 0 for i in gang.seen.incidents)
    await assert_exact(gang, stopped)


async def test_the_job_trains_with_the_units_that_are_whole_and_grows_by_whole_units(
    tmp_path: Path,
) -> None:
    """Slot 1's pod is gone and comes back later. Until then one of the others is a spare."""
    gang = pairs(tmp_path)
    gang.stub["STUB_UNTIL"] = "100000"
    async with gang:
        gang.want(min_workers=2)
        await gang.until(lambda s: s.running and len(s.members) == 4 and s.step >= 3)
        await gang.kill(1)
        gang.want(gone=(levels.SlotAttempt(slot=1, attempt=0),), settings=SOON)
        small = await gang.until(lambda s: s.running and len(s.members) == 2 and s.spares)
        later = await gang.until(lambda s: s.step >= small.step + 40)
        assert later.epoch == small.epoch, "half a unit must not cause a new epoch"
        gang.want(
            settings=levels.JobSettings(gang_seconds=60.0)
        )  # any of the four may be slow to start
        await gang.start(1, 1)
        seen = await gang.until(lambda s: s.running and len(s.members) == 4)
        assert [(m.slot, m.rank) for m in seen.members] == [(0, 0), (1, 1), (2, 2), (3, 3)]
        await stop(gang)


async def test_a_pod_that_is_asked_to_leave_costs_no_step(tmp_path: Path) -> None:
    gang = pairs(tmp_path)
    gang.stub["STUB_UNTIL"] = "100000"
    async with gang:
        gang.want(min_workers=2)
        await gang.until(lambda s: s.running and len(s.members) == 4 and s.step >= 3)
        gang.want(leave=(3,), incident="inc-1", settings=SOON)
        seen = await gang.until(lambda s: s.running and len(s.members) == 2)
        assert {m.slot for m in seen.members} < {0, 1, 2}
        await stop(gang)

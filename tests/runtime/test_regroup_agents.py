"""Real ranks under real agents: the survivors of a death continue in the same step, and the lost slot
joins them again.
"""

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from agent.gang import Gang, assert_exact
from everstep import Job, forming, run
from everstep_agent.coordinator import regroup, step_first_rules
from everstep_agent.pod import spawn
from everstep_contract import levels, report
from everstep_contract.position import Where
from runtime.test_ranks import a_dataset, a_model

STEPS = 60
KILLS = int(os.environ.get("EVERSTEP_REGROUP_KILLS", "40"))
SEED = int(os.environ.get("EVERSTEP_REGROUP_SEED", "0")) or random.SystemRandom().randrange(
    1, 10**6
)


def a_script(
    job: Job, until: int = STEPS, before: Callable[[int], None] = lambda step: None
) -> None:
    model = a_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    job.track(model=model, optimizer=optimizer)
    data = job.batches(a_dataset(), global_batch=24, micro_batch=2)
    fresh = True
    for step in job.steps(until=until):
        before(step.number)
        for inputs, wanted in step.batches(data):
            scope = job._session.meter.position.scope
            assert scope is Where.STARTUP or not fresh, (
                "the first pass must count as start-up, because it may compile"
            )
            fresh = False
            step.backward(nn.functional.cross_entropy(model(inputs), wanted))
            time.sleep(0.004)
        optimizer.step()


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    spawner = spawn.ForkSpawner(lambda: run(a_script, seed=2))
    monkeypatch.setattr(spawn, "SubprocessSpawner", lambda _: spawner)


@pytest.mark.parametrize(
    "victim",
    [2, pytest.param(0, marks=pytest.mark.long)],
    ids=["another rank", "the lead of saves"],
)
async def test_the_survivors_of_a_killed_rank_go_on_in_place_and_it_joins_again(
    tmp_path: Path, forked: None, victim: int
) -> None:
    others = [slot for slot in range(3) if slot != victim]
    async with Gang(tmp_path, 3, in_place=1, hang_seconds=60.0) as gang:
        await gang.until(lambda s: s.step >= 5)
        survivors = [gang.worker(slot) for slot in others]
        os.kill(gang.worker(victim), signal.SIGKILL)
        await gang.until(lambda s: s.epoch == 2 and s.running)
        await gang.until(lambda s: any(not i.open for i in s.incidents))
        incident = gang.seen.incidents[0]
        assert (incident.cause, incident.rung, incident.steps_lost) == ("WorkerDied", "regroup", 0)
        await gang.until(lambda s: s.epoch == 3 and s.running)
        assert [gang.worker(slot) for slot in others] == survivors, "a survivor restarted"
        ends = await gang.reports()
        assert {r.cause for r in ends.values()} == {report.Cause.DONE}
        claims = (await gang.run_log()).claims
        assert [len(c.members) for c in claims] == [3, 2, 3]
        assert [(link.epoch, link.last_step) for link in claims[1].chain] == [(1, incident.step)]
        await assert_exact(gang, STEPS)


def a_script_with_a_broken_link(job: Job) -> None:
    """Rank 1 loses its connections once, in step 5."""

    def cut(step: int) -> None:
        if job.rank == 1 and job.epoch == 1 and step == 5:
            job._session.membership.group.cut()

    a_script(job, before=cut)


async def test_a_group_that_breaks_without_a_death_is_formed_anew_by_the_same_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawner = spawn.ForkSpawner(lambda: run(a_script_with_a_broken_link, seed=2))
    monkeypatch.setattr(spawn, "SubprocessSpawner", lambda _: spawner)
    async with Gang(tmp_path, 3, in_place=1, hang_seconds=60.0) as gang:
        await gang.until(lambda s: s.step >= 1)
        ranks = [gang.worker(slot) for slot in range(3)]
        await gang.until(lambda s: any(not i.open for i in s.incidents))
        incident = gang.seen.incidents[0]
        assert (incident.cause, incident.rung, incident.steps_lost) == ("GroupBroken", "regroup", 0)
        assert [gang.worker(slot) for slot in range(3)] == ranks, "a rank restarted"
        await gang.reports()
        assert [len(c.members) for c in (await gang.run_log()).claims] == [3, 3]
        await assert_exact(gang, STEPS)


def a_script_with_a_note(job: Job) -> None:
    def note(step: int) -> None:
        if job.rank == 1 and step == 2:
            job._session.note_own("its disk is slow")

    a_script(job, 10**6, note)


async def test_what_any_rank_notes_of_itself_is_in_the_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawner = spawn.ForkSpawner(lambda: run(a_script_with_a_note, seed=2))
    monkeypatch.setattr(spawn, "SubprocessSpawner", lambda _: spawner)
    async with Gang(tmp_path, 2) as gang:
        await gang.until(lambda s: "rank 1: its disk is slow" in s.notes, 60.0)


def a_script_whose_second_group_connects_forever(job: Job, folder: Path) -> None:
    """Each rank that has met the others and connects makes a file."""
    make = forming._make

    def wait_forever(keys: Any, place: forming.Place, *more: Any) -> None:
        if place.epoch == 2:
            (folder / f"connects-{place.rank}").touch()
            time.sleep(600)
        make(keys, place, *more)

    forming._make = wait_forever
    a_script(job)


async def test_ranks_whose_former_group_still_connects_to_a_lost_rank_soon_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = partial(a_script_whose_second_group_connects_forever, folder=tmp_path)
    spawner = spawn.ForkSpawner(lambda: run(script, seed=2))
    monkeypatch.setattr(spawn, "SubprocessSpawner", lambda _: spawner)
    monkeypatch.setattr(regroup, "FORM_SECONDS", 600.0)
    async with Gang(tmp_path, 4, in_place=1, hang_seconds=60.0) as gang:
        await gang.until(lambda s: s.step >= 5)
        os.kill(gang.worker(3), signal.SIGKILL)
        await gang.until(lambda _: len([*tmp_path.glob("connects-*")]) == 3)
        os.kill(gang.worker(2), signal.SIGKILL)
        await gang.until(lambda s: any(not i.open for i in s.incidents))
        incident = gang.seen.incidents[0]
        assert (incident.cause, incident.steps_lost) == ("WorkerDied", 0)
        assert "(the former group, which a second loss interrupted, is still" in gang.shown()
        await gang.reports()
        await assert_exact(gang, STEPS)


async def test_a_pod_that_loses_one_of_its_ranks_keeps_the_others_and_replaces_it(
    tmp_path: Path, forked: None
) -> None:
    async with Gang(tmp_path, 2, workers=2, in_place=1, hang_seconds=60.0) as gang:
        await gang.until(lambda s: s.step >= 5)
        others = [(0, 0), (1, 0), (1, 1)]
        survivors = [gang.worker(*place) for place in others]
        os.kill(gang.worker(0, 1), signal.SIGKILL)
        await gang.until(lambda s: s.epoch == 2 and s.running)
        assert [(m.slot, m.rank) for m in gang.seen.members] == [(0, 0), (1, 1), (1, 2)]
        await gang.until(lambda s: s.epoch == 3 and s.running)
        assert [gang.worker(*place) for place in others] == survivors, "a survivor restarted"
        ends = await gang.reports()
        assert {r.cause for r in ends.values()} == {report.Cause.DONE}
        claims = (await gang.run_log()).claims
        assert [len(c.members) for c in claims] == [4, 3, 4]
        await assert_exact(gang, STEPS)


@pytest.mark.parametrize(
    "victim", [pytest.param(2, marks=pytest.mark.long), 0], ids=["another pod", "the coordinator's"]
)
async def test_when_a_whole_pod_is_lost_the_others_go_on_in_place_and_its_next_one_joins(
    tmp_path: Path, forked: None, victim: int
) -> None:
    others = [slot for slot in range(3) if slot != victim]
    async with Gang(tmp_path, 3, in_place=1, hang_seconds=60.0) as gang:
        await gang.until(lambda s: s.step >= 5)
        survivors = [gang.worker(slot) for slot in others]
        await gang.kill(victim)
        await gang.until(lambda s: s.epoch == 2 and s.running)
        await gang.start(victim, 1)
        await gang.until(lambda s: s.epoch == 3 and s.running)
        assert [gang.worker(slot) for slot in others] == survivors
        await gang.reports()
        incident = next(i for s in gang.history for i in s.incidents if not i.open)
        assert (incident.rung, incident.steps_lost) == ("regroup", 0)
        await assert_exact(gang, STEPS)


async def test_a_newcomer_that_dies_while_it_gets_ready_is_replaced_with_the_others_of_its_pod(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawner = spawn.ForkSpawner(lambda: run(lambda job: a_script(job, 10**6), seed=2))
    monkeypatch.setattr(spawn, "SubprocessSpawner", lambda _: spawner)
    async with Gang(tmp_path, 2, workers=2, in_place=1, hang_seconds=60.0) as gang:
        await gang.until(lambda s: s.step >= 3)
        workers = gang.agents[1].pod.workers
        for local in (0, 1):
            os.kill(gang.worker(1, local), signal.SIGKILL)
        async with asyncio.timeout(60):
            while not any(w.joins for w in workers.fresh.values()):  # noqa: ASYNC110 no event tells
                await asyncio.sleep(0.001)
        newcomer = next(w for w in workers.fresh.values() if w.joins)
        os.kill(newcomer.pid, signal.SIGKILL)
        await gang.until(lambda s: s.epoch > 2 and is_whole(s, 4))
        await assert_exact(gang, await gang.suspend())


@pytest.mark.parametrize(
    "leaver", [pytest.param(2, marks=pytest.mark.long), 0], ids=["another pod", "the coordinator's"]
)
async def test_a_pod_that_leaves_saves_first_and_the_others_go_on_without_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leaver: int
) -> None:
    others = [slot for slot in range(3) if slot != leaver]

    def note_begun(step: int) -> None:
        (tmp_path / f"begun-{os.getpid()}").write_text(str(step))

    spawner = spawn.ForkSpawner(lambda: run(lambda job: a_script(job, 10**6, note_begun), seed=2))
    monkeypatch.setattr(spawn, "SubprocessSpawner", lambda _: spawner)
    async with Gang(tmp_path, 3, in_place=1, hang_seconds=60.0) as gang:
        await gang.until(lambda s: s.step >= 5)
        survivors, leaving = [gang.worker(slot) for slot in others], gang.worker(leaver)
        asked = gang.seen.step
        gang.want(leave=(leaver,), leave_reason="its GPU fails")
        await gang.until(lambda s: s.left)
        left = gang.seen.left[0]
        assert (left.slot, left.attempt) == (leaver, 0)
        assert left.step >= asked
        await gang.until(lambda s: s.epoch == 2 and s.running)
        await gang.kill(leaver)
        gang.want(leave=())
        await gang.start(leaver, 1)
        await gang.until(lambda s: s.epoch == 3 and s.running)
        assert [gang.worker(slot) for slot in others] == survivors
        await gang.until(lambda s: all(not i.open for i in s.incidents))
        stopped = await gang.suspend()
        claims = (await gang.run_log()).claims
        assert [(c.cause, len(c.members)) for c in claims] == [
            ("Start", 3), ("Leave", 2), ("Grow", 3),
        ]  # fmt: skip
        incidents = {i.cause: i for s in gang.history for i in s.incidents if not i.open}
        assert set(incidents) == {"Leave"}, "a join must be no incident"
        assert (incidents["Leave"].rung, incidents["Leave"].steps_lost) == ("move", 0)
        begun = int((tmp_path / f"begun-{leaving}").read_text())
        assert begun == incidents["Leave"].step, "it left at a boundary, not within the next step"
        await assert_exact(gang, stopped)


@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.parametrize("ranks", [1, 2], ids=["one rank a pod", "two ranks a pod"])
async def test_many_ranks_killed_at_random_moments_cost_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """Kill one to three ranks, up to 0.5 s apart, so that some die during a regroup or a join."""
    spawner = spawn.ForkSpawner(lambda: run(lambda job: a_script(job, 10**6), seed=2))
    monkeypatch.setattr(spawn, "SubprocessSpawner", lambda _: spawner)
    chance, world = random.Random(SEED), 4
    print(f"seed {SEED}")
    pods = world // ranks
    async with Gang(tmp_path, pods, workers=ranks, in_place=1, hang_seconds=60.0) as gang:
        await gang.until(lambda s: s.step >= 5)
        killed: set[int] = set()
        while len(killed) < KILLS:
            await gang.until(lambda s: is_whole(s, world), 60.0)
            await asyncio.sleep(chance.random() * 0.4)
            before, first = gang.seen.step, time.monotonic()
            for _ in range(chance.choice((1, 1, 1, 2, 2, 3))):
                kill_one(gang, chance, killed)
                await asyncio.sleep(chance.choice((0.0, 0.02, 0.1, 0.5)) * chance.random())
            await gang.until(lambda s, b=before: s.step > b, 60.0)
            print(f"{len(killed)} killed, next step after {time.monotonic() - first:.2f} s")
        await gang.until(lambda s: is_whole(s, world), 60.0)
        stopped = await gang.suspend()
        assert sum(i.steps_lost for s in gang.history for i in s.incidents) == 0
        await assert_exact(gang, stopped)


def is_whole(seen: levels.Seen, world: int) -> bool:
    return seen.running and len(seen.members) == world and all(not i.open for i in seen.incidents)


def kill_one(gang: Gang, chance: random.Random, killed: set[int]) -> None:
    """Kill a rank or a newcomer that gets ready, but not the last rank, which has the state."""
    workers = [a.pod.workers for a in gang.agents.values()]
    ranks = {w.pid for s in workers for w in s.current.values() if w.alive} - killed
    newcomers = {w.pid for s in workers for w in s.fresh.values() if w.joins} - killed
    if len(ranks) > 1:
        victim = chance.choice(sorted(ranks | newcomers))
        killed.add(victim)
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)


def a_slow_survivor(job: Job) -> None:
    """Rank 1 has yet to apply step 8 when rank 2 has applied it and rank 0 dies."""
    model = a_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    job.track(model=model, optimizer=optimizer)
    data = job.batches(a_dataset(), global_batch=24, micro_batch=2)
    rank = job.rank
    for step in job.steps(until=14):
        if rank == 0 and step.number == 9 and not job._session.start.join:
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGKILL)
        for inputs, wanted in step.batches(data):
            step.backward(nn.functional.cross_entropy(model(inputs), wanted))
        if rank == 1 and step.number == 8:
            time.sleep(0.6)
        optimizer.step()


async def test_a_step_that_a_slow_survivor_applies_after_the_regroup_is_in_its_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawner = spawn.ForkSpawner(lambda: run(a_slow_survivor, seed=2))
    monkeypatch.setattr(spawn, "SubprocessSpawner", lambda _: spawner)
    async with Gang(tmp_path, 3, in_place=1, hang_seconds=60.0) as gang:
        await gang.until(lambda s: s.step >= 2)
        gang.want(min_workers=2, want_workers=2, max_workers=2)
        await gang.reports()
        await assert_exact(gang, 14)


@pytest.mark.parametrize(
    "goes_on", [True, pytest.param(False, marks=pytest.mark.long)], ids=["in place", "restart"]
)
async def test_a_coordinator_lost_between_claim_and_publication_costs_no_step(
    tmp_path: Path, forked: None, monkeypatch: pytest.MonkeyPatch, goes_on: bool
) -> None:
    """The next coordinator finds the claim of an epoch that was never published. Here every epoch is claimed
    before its first step.
    """
    begin, failed = regroup.begin, []

    def fail_once(*given: object) -> None:
        if failed:
            return begin(*given)  # type: ignore[arg-type]
        failed.append(given)
        if not goes_on:
            monkeypatch.setattr(regroup, "regroup", refuse)
        raise KeyError("as told")

    async def refuse(term: object, found: object) -> object:
        return found

    monkeypatch.setattr("everstep_agent.coordinator.faults.REST_SECONDS", (0.5, 0.5, 0.5))
    monkeypatch.setattr(regroup, "begin", fail_once)
    monkeypatch.setattr(step_first_rules, "why_claim_first", lambda *_, **__: "as told")
    async with Gang(tmp_path, 3, in_place=1, hang_seconds=60.0) as gang:
        await gang.until(lambda s: s.step >= 5)
        os.kill(gang.worker(2), signal.SIGKILL)
        ends = await gang.reports()
        assert {r.cause for r in ends.values()} == {report.Cause.DONE}
        assert failed
        assert all(i.steps_lost == 0 for i in gang.seen.incidents), gang.seen.incidents
        claims = (await gang.run_log()).claims
        assert [len(c.members) for c in claims][:3] == [3, 2, 2 if goes_on else 3]
        await assert_exact(gang, STEPS)

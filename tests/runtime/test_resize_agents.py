"""Real ranks under real agents: the running job shrinks and grows by several pods at once, and no other
rank restarts.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from agent.gang import Gang, assert_exact
from everstep import Job, run, transfer
from everstep_agent.agent import MARGIN_SECONDS
from everstep_agent.coordinator import (
    due_saves,
    last_save,
    leave_in_place,
    saves,
    stalled_joins,
    transfer_rules,
)
from everstep_agent.peers.epoch_level import EpochLevel
from everstep_agent.pod import refusals, spawn
from everstep_agent.storage.retrying import Retrying
from everstep_contract import levels, report
from runtime.test_ranks import a_dataset, a_model
from runtime.test_regroup_agents import a_script


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    spawner = spawn.ForkSpawner(lambda: run(lambda job: a_script(job, 10**6), seed=2))
    monkeypatch.setattr(spawn, "SubprocessSpawner", lambda _: spawner)


def a_gang(folder: Path, size: int) -> Gang:
    return Gang(folder, size, in_place=1, hang_seconds=60.0)


def resize(gang: Gang, want: int, **changes: object) -> None:
    gang.want(min_workers=1, want_workers=want, max_workers=max(want, 5), **changes)


def list_pids(gang: Gang, slots: Iterable[int]) -> list[int]:
    return [gang.worker(slot) for slot in slots]


async def until_slots(gang: Gang, *slots: int) -> levels.Seen:
    """Wait until the job steps with exactly these members."""

    def is_so(seen: levels.Seen) -> bool:
        return seen.running and tuple(sorted(m.slot for m in seen.members)) == slots

    seen = await gang.until(is_so, 60.0)
    return await gang.until(lambda s: s.running and s.step > seen.step, 60.0)


async def until_left(gang: Gang, *slots: int) -> None:
    await gang.until(lambda s: {*slots} <= {a.slot for a in s.left}, 60.0)


async def until_ready(gang: Gang, slot: int) -> None:
    """Wait until the coordinator knows that the slot's worker waits, though the job has no place for it yet."""

    def is_known(seen: levels.Seen) -> bool:
        first = gang.agents[seen.coordinator.slot]._state.coordinator if seen.coordinator else None
        reports = first.term.recent() if first else []
        return any(r.slot == slot and any(r.fresh) for r in reports)

    await gang.until(is_known, 60.0)


async def finish(gang: Gang) -> list[tuple[str, int]]:
    """Stop the job and check each sample; return cause and size of each claim."""
    stopped = await gang.suspend()
    assert sum(i.steps_lost for s in gang.history for i in s.incidents) == 0
    await assert_exact(gang, stopped)
    return [(c.cause, len(c.members)) for c in (await gang.run_log()).claims]


@pytest.mark.parametrize("on_loss", ["Wait", pytest.param("Shrink", marks=pytest.mark.long)])
async def test_a_lower_size_lets_several_slots_leave_at_once(
    tmp_path: Path, endless: None, on_loss: str
) -> None:
    """`Wait` applies to losses, and this is none."""
    async with Gang(tmp_path, 4, in_place=1, hang_seconds=60.0, on_loss=on_loss) as gang:
        await gang.until(lambda s: s.step >= 3, 60.0)
        stay = list_pids(gang, (0, 1))
        resize(gang, 2, leave=(2, 3), leave_reason="replicas is 2")
        await until_left(gang, 2, 3)
        for slot in (2, 3):
            await gang.kill(slot)
        resize(gang, 2, leave=())
        await until_slots(gang, 0, 1)
        assert list_pids(gang, (0, 1)) == stay
        assert await finish(gang) == [("Start", 4), ("Leave", 2)]
        incidents = {i.cause: i for s in gang.history for i in s.incidents if not i.open}
        assert set(incidents) == {"Shrink"}


async def test_a_higher_size_lets_several_pods_join_at_once(tmp_path: Path, endless: None) -> None:
    async with a_gang(tmp_path, 2) as gang:
        await gang.until(lambda s: s.step >= 3, 60.0)
        stay = list_pids(gang, (0, 1))
        resize(gang, 4)
        await gang.start(2, 0)
        await gang.start(3, 0)
        await until_slots(gang, 0, 1, 2, 3)
        assert list_pids(gang, (0, 1)) == stay
        claims = await finish(gang)
        assert [cause for cause, _ in claims[1:]] == ["Grow"] * (len(claims) - 1)
        assert claims[-1] == ("Grow", 4)


async def test_the_last_step_is_saved_by_all_even_if_a_pod_joins_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The join drops the save of the former ranks, which the store has not taken yet."""
    last, pump = 5, saves.Saves.pump

    def pump_later(own: saves.Saves, epoch: EpochLevel, *given: Any) -> None:
        if epoch.number > 1:
            pump(own, epoch, *given)

    def until_armed(job: Job, step: int) -> None:
        while step == last and job._session.meter.armed != last:
            (tmp_path / "last").touch()
            time.sleep(0.005)

    def main(job: Job) -> None:
        a_script(job, last, partial(until_armed, job))

    spawner = spawn.ForkSpawner(lambda: run(main, seed=2))
    monkeypatch.setattr(spawn, "SubprocessSpawner", lambda _: spawner)
    monkeypatch.setattr(saves.Saves, "pump", pump_later)
    monkeypatch.setattr(last_save, "LAST_SAVE_SECONDS", 20.0)
    async with a_gang(tmp_path, 2) as gang:
        await gang.until(lambda _: (tmp_path / "last").exists(), 60.0)
        resize(gang, 3)
        await gang.start(2, 0)
        ends = await gang.reports()
        assert {r.cause for r in ends.values()} == {report.Cause.DONE}
        claims = (await gang.run_log()).claims
        assert [(c.cause, len(c.members)) for c in claims] == [("Start", 2), ("Grow", 3)]
        assert {i.cause for s in gang.history for i in s.incidents} == set()
        await assert_exact(gang, last)


def a_script_with_a_batch(job: Job, choose_batch: Callable[[Job], int]) -> None:
    model = a_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    job.track(model=model, optimizer=optimizer)
    data = job.batches(a_dataset(), global_batch=choose_batch(job), micro_batch=2)
    for step in job.steps(until=10**6):
        for inputs, wanted in step.batches(data):
            step.backward(nn.functional.cross_entropy(model(inputs), wanted))
        optimizer.step()


def a_batch_for_each_rank(
    monkeypatch: pytest.MonkeyPatch, choose_batch: Callable[[Job], int]
) -> None:
    script = partial(a_script_with_a_batch, choose_batch=choose_batch)
    spawner = spawn.ForkSpawner(lambda: run(script, seed=2))
    monkeypatch.setattr(spawn, "SubprocessSpawner", lambda _: spawner)


async def test_a_rank_that_joins_computes_the_same_settings_from_the_world_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its global batch would be 24, that of the running ranks is 16."""
    a_batch_for_each_rank(monkeypatch, lambda job: 8 * job.world_size)
    async with a_gang(tmp_path, 2) as gang:
        await gang.until(lambda s: s.step >= 3, 60.0)
        resize(gang, 3)
        await gang.start(2, 0)
        await until_slots(gang, 0, 1, 2)
        assert await finish(gang) == [("Start", 2), ("Grow", 3)]


async def test_a_rank_that_differs_is_told_and_joins_once_it_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusals, "PAUSE_SECONDS", (0.0, 0.2))
    monkeypatch.setattr(stalled_joins, "PAUSE_SECONDS", (0.0, 0.2))
    batch = tmp_path / "batch"
    batch.write_text("16")
    a_batch_for_each_rank(monkeypatch, lambda job: int(batch.read_text()))
    async with a_gang(tmp_path, 2) as gang:
        await gang.until(lambda s: s.step >= 3, 60.0)
        batch.write_text("24")
        resize(gang, 3)
        await gang.start(2, 0)
        told = "slot 2: its rank cannot join: job.batches, feed 1: this rank differs"
        refused = await gang.until(lambda s: any(n.startswith(told) for n in s.notes), 60.0)
        await gang.until(lambda s: s.step > refused.step, 60.0)
        batch.write_text("16")
        seen = await until_slots(gang, 0, 1, 2)
        assert not any(note.startswith(told) for note in seen.notes)
        claims = await finish(gang)
        assert claims[0] == ("Start", 2)
        assert claims[-1] == ("Grow", 3)


@pytest.mark.parametrize(
    "leaver", [2, pytest.param(0, marks=pytest.mark.long)], ids=["another pod", "the coordinator's"]
)
async def test_a_slot_leaves_and_its_replacement_joins_in_one_epoch(
    tmp_path: Path, endless: None, monkeypatch: pytest.MonkeyPatch, leaver: int
) -> None:
    """As after a spot notice if another pod waits already. On a busy machine that pod takes long to get ready."""
    monkeypatch.setattr(leave_in_place, "REPLACEMENT_SECONDS", 60.0)
    others = [slot for slot in range(3) if slot != leaver]
    async with a_gang(tmp_path, 3) as gang:
        await gang.until(lambda s: s.step >= 3, 60.0)
        stay = list_pids(gang, others)
        await gang.start(3, 0)
        await until_ready(gang, 3)
        gang.want(leave=(leaver,), leave_reason="spot notice")
        await until_left(gang, leaver)
        await until_slots(gang, *others, 3)
        await gang.kill(leaver)
        gang.want(leave=())
        await until_slots(gang, *others, 3)
        assert list_pids(gang, others) == stay
        assert await finish(gang) == [("Start", 3), ("Leave", 3)]
        incidents = {i.cause: i for s in gang.history for i in s.incidents if not i.open}
        assert {cause: i.rung for cause, i in incidents.items()} == {"Leave": "move"}


async def test_a_slot_leaves_and_comes_back_while_another_joins(
    tmp_path: Path, endless: None
) -> None:
    async with a_gang(tmp_path, 3) as gang:
        await gang.until(lambda s: s.step >= 3, 60.0)
        stay = list_pids(gang, (0, 1))
        resize(gang, 4, leave=(2,), leave_reason="its node is drained")
        await gang.start(3, 0)
        await until_left(gang, 2)
        await gang.kill(2)
        gang.want(leave=())
        await gang.start(2, 1)
        await until_slots(gang, 0, 1, 2, 3)
        assert list_pids(gang, (0, 1)) == stay
        claims = await finish(gang)
        assert {cause for cause, _ in claims[1:]} == {"Leave", "Grow"}
        assert claims[-1] == ("Grow", 4)


def a_script_of_many_states(job: Job, torn: bool = False) -> None:
    """Forward changes buffers, the learning rate falls, and dropout draws random numbers. With `torn` the state
    changes within the loop, so it cannot be copied beside a step.
    """
    model = nn.Sequential(nn.Linear(6, 64), nn.BatchNorm1d(64), nn.Dropout(), nn.Linear(64, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
    job.track(model=model, optimizer=optimizer, schedule=schedule)
    data = job.batches(a_dataset(), global_batch=24, micro_batch=4)
    for step in job.steps(until=10**6):
        for inputs, wanted in step.batches(data):
            step.backward(nn.functional.cross_entropy(model(inputs), wanted))
            if torn:
                with torch.no_grad():
                    model[0].weight.mul_(1.0)
            time.sleep(0.01)
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize("torn", [False, True], ids=["beside a step", "at the boundary"])
async def test_a_newcomer_gets_the_state_that_the_members_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torn: bool
) -> None:
    """Each commit compares the states of all ranks, and the last save is a commit."""
    script = lambda job: a_script_of_many_states(job, torn)  # noqa: E731
    spawner = spawn.ForkSpawner(lambda: run(script, seed=2))
    monkeypatch.setattr(spawn, "SubprocessSpawner", lambda _: spawner)
    async with a_gang(tmp_path, 2) as gang:
        await gang.until(lambda s: s.step >= 3, 60.0)
        stay = list_pids(gang, (0, 1))
        resize(gang, 3)
        await gang.start(2, 0)
        await until_slots(gang, 0, 1, 2)
        assert list_pids(gang, (0, 1)) == stay
        claims = await finish(gang)
        assert claims[-1] == ("Grow", 3)
        assert {cause for cause, _ in claims[1:-1]} == ({"GrowFailed"} if torn else set())
        assert not [i for s in gang.history for i in s.incidents], "a join must be no incident"


def a_script_that_takes_nothing_once(job: Job, flag: Path) -> None:
    if job._session.start.join and job._session.start.rank == 3 and not flag.exists():
        flag.touch()
        transfer.take = lambda *_: time.sleep(3600)
    a_script(job, 10**6)


async def test_a_newcomer_that_receives_nothing_is_left_out_and_the_other_joins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is restarted and joins later."""
    monkeypatch.setattr(transfer_rules, "STILL_SECONDS", 4.0)
    monkeypatch.setattr(stalled_joins, "PAUSE_SECONDS", (0.0, 0.2))
    script = lambda job: a_script_that_takes_nothing_once(job, tmp_path / "still")  # noqa: E731
    spawner = spawn.ForkSpawner(lambda: run(script, seed=2))
    monkeypatch.setattr(spawn, "SubprocessSpawner", lambda _: spawner)
    async with a_gang(tmp_path, 2) as gang:
        await gang.until(lambda s: s.step >= 3, 60.0)
        stay = list_pids(gang, (0, 1))
        for slot in (2, 3):
            await gang.start(slot, 0)
            await until_ready(gang, slot)
        resize(gang, 4)
        await until_slots(gang, 0, 1, 2, 3)
        assert list_pids(gang, (0, 1)) == stay
        claims = [
            c for c in await finish(gang) if c[0] != "GrowFailed"
        ]  # a busy machine may need more
        assert claims == [("Start", 2), ("Grow", 3), ("Grow", 4)]
        assert "slot 3 has 0 MiB of the state" in gang.shown()


LONG = pytest.mark.long


@pytest.mark.parametrize(
    "leavers",
    [pytest.param((2,), marks=LONG), (0,), (1, 2), pytest.param((0, 2), marks=LONG)],
    ids=str,
)
async def test_pods_that_get_sigterm_leave_and_the_others_go_on(
    tmp_path: Path, endless: None, leavers: tuple[int, ...]
) -> None:
    others = [slot for slot in range(4) if slot not in leavers]
    async with a_gang(tmp_path, 4) as gang:
        await gang.until(lambda s: s.step >= 3, 60.0)
        stay = list_pids(gang, others)
        for slot in leavers:
            gang.agents[slot].leave()
        await until_left(gang, *leavers)
        await until_slots(gang, *others)
        assert list_pids(gang, others) == stay
        for slot in leavers:
            gang.tasks.pop(slot)
            await gang.start(slot, 1)
        await until_slots(gang, 0, 1, 2, 3)
        assert list_pids(gang, others) == stay
        claims = await finish(gang)
        assert {cause for cause, _ in claims[1:]} == {"Leave", "Grow"}


@pytest.mark.parametrize(
    "leaver", [0, pytest.param(2, marks=LONG)], ids=["the coordinator's", "another pod"]
)
async def test_a_pod_leaves_beside_an_armed_boundary_before_its_notice_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leaver: int
) -> None:
    """The store takes no chunks, and the boundary of the last save is over only after three steps."""
    pause, notice, takes, put = 1.3, 2.5, asyncio.Event(), Retrying.put

    async def wait(store: Retrying, key: str, body: bytes) -> None:
        if key.startswith("chunks/"):
            await takes.wait()
        await put(store, key, body)

    monkeypatch.setattr(Retrying, "put", wait)
    script = partial(a_script, until=10**6, before=lambda step: time.sleep(pause))
    spawner = spawn.ForkSpawner(lambda: run(script, seed=2))
    monkeypatch.setattr(spawn, "SubprocessSpawner", lambda _: spawner)
    others = [slot for slot in range(3) if slot != leaver]
    grace = notice + MARGIN_SECONDS
    async with Gang(tmp_path, 3, in_place=1, hang_seconds=60.0, grace_seconds=grace) as gang:
        await gang.until(lambda s: s.step >= 1, 60.0)
        stay = list_pids(gang, others)
        gang.agents[leaver].leave()
        await until_left(gang, leaver)
        await until_slots(gang, *others)
        assert list_pids(gang, others) == stay
        takes.set()
        assert await finish(gang) == [("Start", 3), ("Leave", 2)]


@pytest.mark.parametrize("joins", [False, pytest.param(True, marks=pytest.mark.long)])
async def test_a_save_that_a_change_of_membership_drops_is_soon_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, endless: None, joins: bool
) -> None:
    """The store takes nothing before that change."""
    pump = saves.Saves.pump

    def pump_later(own: saves.Saves, epoch: EpochLevel, *given: Any) -> None:
        if epoch.number > 1:
            pump(own, epoch, *given)

    monkeypatch.setattr(saves.Saves, "pump", pump_later)
    monkeypatch.setattr(due_saves, "DROPPED_SECONDS", 0.2)
    every = 100
    async with Gang(tmp_path, 2, in_place=1, hang_seconds=60.0, save_every_steps=every) as gang:
        await gang.until(lambda s: s.staged is not None and s.step > every, 60.0)
        if joins:
            resize(gang, 3)
            await gang.start(2, 0)
        else:
            os.kill(gang.worker(1), signal.SIGKILL)
        seen = await gang.until(lambda s: s.committed, 60.0)
        assert seen.committed.step % every, "it is not that of the next interval"

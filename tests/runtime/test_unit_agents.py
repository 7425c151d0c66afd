"""Two units of two real ranks under real agents: FSDP2 within a unit, Everstep between them."""

import asyncio
import contextlib
import os
import random
import re
import signal
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from agent.gang import Gang, assert_exact
from agent.network import Network
from everstep import Job, run
from everstep_agent import storage
from everstep_agent.pod import spawn
from everstep_agent.runlog.run_log import RunLog
from everstep_agent.tools import verify
from everstep_contract import levels, log
from everstep_contract.units import Mesh
from runtime.a_sharded_job import shard_layers
from runtime.test_no_progress_agents import LEARNT
from runtime.test_ranks import a_dataset, a_model
from runtime.test_regroup_agents import KILLS, SEED, is_whole
from runtime.test_silent_nodes import PoweredGang, network

pytestmark = pytest.mark.usefixtures("warm_for_units")

STEPS, EVERY, AT = 12, 4, 6
NEAR_STEPS, KEPT = 20, 4
SHARD = Mesh(shard=2)
__all__ = ["network"]  # a fixture


def build(job: Job) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """A tracked model that the ranks of a unit divide."""
    torch.set_num_threads(1)
    model = a_model()
    shard_layers(model, job.mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    job.track(model=model, optimizer=optimizer)
    return model, optimizer


def a_script(job: Job, gate: Path) -> None:
    """In step 7 each rank waits for the gate file between a forward and its backward."""
    model, optimizer = build(job)
    data = job.batches(
        a_dataset(), global_batch=10, micro_batch=2
    )  # five micro-batches for four ranks
    for step in job.steps(until=STEPS):
        for inputs, wanted in step.batches(data):
            loss = nn.functional.cross_entropy(model(inputs), wanted)
            while step.number == AT + 1 and not gate.exists():
                time.sleep(0.005)
            step.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Any]:
    """Filled by the first test that needs it."""
    return {}


async def train(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    killed: tuple[int, ...] = (),
    on_loss: str = "Wait",
) -> tuple[list[Any], levels.Seen, list[log.Claim]]:
    """Train, with these ranks killed in step 7; return the ledger, the last `seen` and the claims."""
    await asyncio.to_thread(folder.mkdir)
    gate = folder / "gate"
    forked = spawn.ForkSpawner(lambda: run(lambda job: a_script(job, gate), seed=3))
    monkeypatch.setattr(spawn, "SubprocessSpawner", lambda _: forked)
    settings: dict[str, Any] = {"mesh": SHARD, "in_place": 1, "on_loss": on_loss}
    async with Gang(folder, 4, save_every_steps=EVERY, **settings) as gang:
        await gang.until(lambda s: s.step >= AT and s.committed and s.committed.step >= EVERY)
        for rank in killed:
            os.kill(gang.worker(rank), signal.SIGKILL)
        gate.touch()
        await gang.reports()
        seen, claims, shown = gang.seen, (await gang.run_log()).claims, gang.shown()
        read = [dict(gang.agents[slot].pod.restored_from) for slot in sorted(gang.agents)]
    assert not any("store" in tiers for tiers in read), f"an agent read from the store: {read}"
    assert all(read) == bool(killed)
    if killed:
        brought = sum(n for tiers in read for tier, n in tiers.items() if tier != "memory")
        assert 0 < brought < count_left(shown), (
            "the pods brought parts that their ranks do not need"
        )
    store = storage.open_store(f"file://{folder}/store", "ns/job", {})
    return [replace(e, epoch=0) for e in await verify.load_ledger(store)], seen, claims


@pytest.mark.parametrize(
    ("killed", "on_loss", "lost"),
    [((3,), "Wait", 0), pytest.param((1, 2), "Shrink", AT - EVERY, marks=pytest.mark.long)],
    ids=["one unit, and all wait for it", "both units"],
)
async def test_where_all_restart_the_run_equals_an_undisturbed_one_bit_for_bit(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    undisturbed: dict[str, Any],
    killed: tuple[int, ...],
    on_loss: str,
    lost: int,
) -> None:
    """A whole unit saves. If there is none, all go back to the commit."""
    if not undisturbed:
        undisturbed["ledger"], _, _ = await train(tmp_path / "undisturbed", monkeypatch)
    ledger, seen, claims = await train(tmp_path / "disturbed", monkeypatch, killed, on_loss)
    assert [e.step for e in ledger] == list(range(1, STEPS + 1))
    assert ledger == undisturbed["ledger"], "the ledger differs from the undisturbed run's"
    assert [len(c.members) for c in claims] == [4, 4]
    assert sum(i.steps_lost for i in seen.incidents) == lost
    loaded = await asyncio.to_thread(everstep.load, f"file://{tmp_path}/disturbed/store/ns/job")
    alone = a_model()
    alone.load_state_dict(loaded["model"])
    assert loaded.step == STEPS


def count_left(shown: str) -> int:
    """How many chunks the pods did not hold when an epoch began, all pods together."""
    return sum(map(int, re.findall(r"event=fetched .*\blater=(\d+)", shown)))


def a_slow_script(job: Job, struck: Path) -> None:
    """The last step waits until `struck` exists: the kill must not come after it."""
    model, optimizer = build(job)
    data = job.batches(a_dataset(), global_batch=8, micro_batch=2)
    for step in job.steps(until=NEAR_STEPS):
        while step.number == NEAR_STEPS and not struck.exists():
            time.sleep(0.01)
        for inputs, wanted in step.batches(data):
            step.backward(nn.functional.cross_entropy(model(inputs), wanted))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        time.sleep(0.05)


async def train_one_unit(
    folder: Path, monkeypatch: pytest.MonkeyPatch, killed: int | None = None
) -> tuple[list[Any], RunLog]:
    """Train four ranks that hold one model, and kill one once a near save is kept; return ledger and run log."""
    struck = folder / "struck"
    forked = spawn.ForkSpawner(lambda: run(lambda job: a_slow_script(job, struck), seed=3))
    monkeypatch.setattr(spawn, "SubprocessSpawner", lambda _: forked)
    await asyncio.to_thread(folder.mkdir)
    async with Gang(folder, 4, mesh=Mesh(shard=4), max_redo_seconds=0.3) as gang:
        if killed is not None:
            await gang.until(lambda s: s.kept_step >= KEPT)
            os.kill(gang.worker(killed), signal.SIGKILL)
        await asyncio.to_thread(struck.touch)
        await gang.reports()
        read = [dict(gang.agents[slot].pod.restored_from) for slot in sorted(gang.agents)]
        log = await gang.run_log()
    assert not any("store" in tiers for tiers in read), f"an agent read from the store: {read}"
    store = storage.open_store(f"file://{folder}/store", "ns/job", {})
    return [replace(e, epoch=0) for e in await verify.load_ledger(store)], log


async def test_a_rank_of_the_only_unit_costs_the_steps_since_the_last_near_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps are computed again exactly, so the run equals an undisturbed one bit for bit."""
    undisturbed, log = await train_one_unit(tmp_path / "undisturbed", monkeypatch)
    assert [c.step for c in log.commits] == [NEAR_STEPS], "a near save was committed without need"
    ledger, log = await train_one_unit(tmp_path / "disturbed", monkeypatch, killed=2)
    assert ledger == undisturbed
    assert [e.step for e in ledger] == list(range(1, NEAR_STEPS + 1))
    rescued = [c.step for c in log.commits if c.epoch == log.claims[0].epoch]
    assert rescued, "the near save must be committed when it is needed"
    assert rescued[0] >= KEPT
    assert [c.last_step for c in log.claims[1].chain] == [rescued[-1]]
    assert log.commits[-1].step == NEAR_STEPS


def an_endless_script(job: Job, global_batch: int = 24) -> None:
    model, optimizer = build(job)
    data = job.batches(a_dataset(), global_batch=global_batch, micro_batch=2)
    for step in job.steps(until=10**6):
        for inputs, wanted in step.batches(data):
            step.backward(nn.functional.cross_entropy(model(inputs), wanted))
            time.sleep(0.004)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    spawner = spawn.ForkSpawner(lambda: run(an_endless_script, seed=2))
    monkeypatch.setattr(spawn, "SubprocessSpawner", lambda _: spawner)


async def test_a_unit_is_lost_with_its_rank_the_other_goes_on_and_it_joins_again_whole(
    tmp_path: Path, endless: None
) -> None:
    async with Gang(tmp_path, 4, mesh=SHARD, in_place=1, hang_seconds=60.0) as gang:
        await gang.until(lambda s: s.step >= 5)
        before = [gang.worker(slot) for slot in range(4)]
        os.kill(before[1], signal.SIGKILL)
        await gang.until(lambda s: s.epoch == 2 and s.running)
        await gang.until(lambda s: any(not i.open for i in s.incidents))
        incident = gang.seen.incidents[0]
        assert (incident.cause, incident.rung, incident.steps_lost) == ("WorkerDied", "regroup", 0)
        await gang.until(lambda s: s.epoch == 3 and is_whole(s, 4), 60.0)
        after = [gang.worker(slot) for slot in range(4)]
        assert [old == new for old, new in zip(before, after, strict=True)] == [
            False, False, True, True,
        ]  # fmt: skip
        joined = gang.seen.step
        await gang.until(lambda s: s.step > joined + 2)
        stopped = await gang.suspend()
        assert [len(c.members) for c in (await gang.run_log()).claims] == [4, 2, 4]
        await assert_exact(gang, stopped)


async def test_a_newcomer_that_stops_before_it_has_learnt_a_limit_is_cut_out(
    tmp_path: Path, endless: None
) -> None:
    """The rest of its unit has learned no limit either, and waits in a collective that looks like computing."""
    async with Gang(tmp_path, 4, mesh=SHARD, in_place=1, hang_seconds=60.0) as gang:
        await gang.until(lambda s: s.step >= 5)
        os.kill(gang.worker(1), signal.SIGKILL)
        await gang.until(lambda s: s.epoch == 3 and is_whole(s, 4), 60.0)
        os.kill(gang.worker(1), signal.SIGSTOP)
        await gang.until(lambda s: s.epoch == 4 and s.running, 30.0)  # far below hang_seconds
        await gang.until(lambda s: not any(i.open for i in s.incidents))
        incident = gang.seen.incidents[-1]
        assert (incident.cause, incident.rank, incident.steps_lost) == ("NoProgress", 1, 0)
        assert "stopped by a signal" in incident.message
        await assert_exact(gang, await gang.suspend())


async def test_a_rank_that_stops_is_cut_out_with_its_unit_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest of its unit makes no progress either, in a collective that looks like computing. A step has one pass."""
    spawner = spawn.ForkSpawner(lambda: run(partial(an_endless_script, global_batch=8), seed=2))
    monkeypatch.setattr(spawn, "SubprocessSpawner", lambda _: spawner)
    async with Gang(tmp_path, 4, mesh=SHARD, in_place=1, hang_seconds=60.0) as gang:
        await gang.until(lambda s: s.step >= LEARNT, 60.0)
        os.kill(gang.worker(1), signal.SIGSTOP)
        await gang.until(lambda s: s.epoch == 2 and s.running, 30.0)  # far below hang_seconds
        await gang.until(lambda s: any(not i.open for i in s.incidents))
        (incident,) = gang.seen.incidents
        assert (incident.cause, incident.rung, incident.steps_lost) == ("NoProgress", "regroup", 0)
        assert (incident.rank, incident.slot) == (1, 1), incident.message
        await assert_exact(gang, await gang.suspend())


async def test_a_whole_unit_steps_on_when_a_node_of_the_other_unit_falls_silent(
    tmp_path: Path, network: Network, endless: None
) -> None:
    """It holds two of four ranks, and not the lowest slot. But the silent node's mate is ended, and has no side."""
    async with PoweredGang(tmp_path, network, 4, mesh=SHARD) as gang:
        await gang.until(lambda s: s.step >= LEARNT, 60.0)
        survivors = [gang.worker(2), gang.worker(3)]
        await gang.lose_power(0)
        gang.forget(0)
        await gang.until(lambda s: s.epoch > 1 and s.running, 60.0)
        await gang.until(lambda s: any(not i.open for i in s.incidents))
        assert [gang.worker(2), gang.worker(3)] == survivors
        (incident,) = gang.seen.incidents
        assert (incident.cause, incident.rung, incident.steps_lost) == ("AgentLost", "regroup", 0)
        why = {x.slot: x.why for x in (await gang.run_log()).claims[1].left_out}
        assert why == {0: "left behind by the majority", 1: "its agent reported its end"}
        await assert_exact(gang, await gang.suspend())


@pytest.mark.long
async def test_when_a_node_of_the_only_unit_loses_its_power_the_other_rank_does_not_wait_for_it(
    tmp_path: Path, network: Network, endless: None
) -> None:
    """It waits within its unit, which looks like computing, and nothing closes its connection."""
    settings: dict[str, Any] = {"mesh": SHARD, "max_redo_seconds": 0.5}
    async with PoweredGang(tmp_path, network, 2, **settings) as gang:
        await gang.until(lambda s: s.copied_step >= s.kept_step >= 8)
        await gang.lose_power(1)
        gang.forget(1)
        before = gang.seen.step
        await gang.until(lambda s: bool(s.incidents), 30.0)
        gang.want(gone=(levels.SlotAttempt(slot=1, attempt=0),))
        await gang.start(1, 1)
        await gang.until(lambda s: s.epoch >= 2 and s.running and s.step > before, 45.0)
        (incident,) = gang.seen.incidents
        assert incident.cause == "AgentLost", incident
        log = await gang.run_log()
        assert log.commits[0].epoch == 1, "the job must continue from a near save of epoch 1"
        await assert_exact(gang, await gang.suspend())


@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.parametrize("ranks", [1, 2], ids=["one rank a pod", "two ranks a pod"])
async def test_many_ranks_of_units_killed_or_stopped_at_random_moments_cost_no_step(
    tmp_path: Path, endless: None, ranks: int
) -> None:
    async with Gang(
        tmp_path, 6 // ranks, workers=ranks, mesh=SHARD, in_place=1, hang_seconds=60.0
    ) as gang:
        await hit_many(gang, 6, KILLS)


async def hit_many(gang: Gang, world: int, hits: int) -> None:
    """Hit one to three ranks, up to 0.5 s apart, so that some are hit in a regroup or join. Leave one unit alone.
    Then suspend the job and check each sample.
    """
    chance = random.Random(SEED)
    print(f"seed {SEED}")
    await gang.until(lambda s: s.step >= 5)
    hit: set[int] = set()
    while len(hit) < hits:
        await gang.until(lambda s: is_whole(s, world) and not has_any(gang, hit), 120.0)
        await asyncio.sleep(chance.random() * 0.4)
        before, first = gang.seen.step, time.monotonic()
        spared = choose_spared(gang, chance)
        for _ in range(chance.choice((1, 1, 1, 2, 2, 3))):
            hit_one_but(gang, chance, hit, spared)
            await asyncio.sleep(chance.choice((0.0, 0.02, 0.1, 0.5)) * chance.random())
        await gang.until(lambda s, b=before: s.step > b, 60.0)
        print(f"{len(hit)} hit, next step after {time.monotonic() - first:.2f} s")
    await gang.until(lambda s: is_whole(s, world), 120.0)
    stopped = await gang.suspend()
    assert sum(i.steps_lost for s in gang.history for i in s.incidents) == 0
    await assert_exact(gang, stopped)


def has_any(gang: Gang, pids: set[int]) -> bool:
    """Return whether the job still has a process that was hit. More hits now might leave no unit whole."""
    workers = [a.pod.workers for a in gang.agents.values()]
    return any(w.pid in pids for s in workers for w in (*s.current.values(), *s.fresh.values()))


def choose_spared(gang: Gang, chance: random.Random) -> set[int]:
    """Return the processes of one unit."""
    workers = {w.rank: w.pid for a in gang.agents.values() for w in a.pod.workers.current.values()}
    unit = chance.randrange(len(workers) // SHARD.unit)
    return {workers[rank] for rank in SHARD.list_unit(unit)}


def hit_one_but(gang: Gang, chance: random.Random, hit: set[int], spared: set[int]) -> None:
    """Kill or stop a rank or a newcomer that gets ready."""
    workers = [a.pod.workers for a in gang.agents.values()]
    ranks = {w.pid for s in workers for w in s.current.values() if w.alive}
    newcomers = {w.pid for s in workers for w in s.fresh.values() if w.joins}
    if victims := sorted((ranks | newcomers) - hit - spared):
        victim = chance.choice(victims)
        hit.add(victim)
        how = chance.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP))
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, how)

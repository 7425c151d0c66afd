"""Several real ranks on one GPU, under real agents: regroup in place over NCCL, saves, units.

NCCL refuses two ranks on one GPU of one host. So each rank here reports a different host, and they connect by sockets.
Run this file alone: the ranks are forks, so this process must not have used CUDA before.
"""

import asyncio
import os
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
from everstep import Job, run
from everstep_agent.pod import spawn
from everstep_agent.tools import verify
from everstep_contract import report
from everstep_contract.units import Mesh
from runtime.a_sharded_job import shard_layers
from runtime.test_ranks import a_dataset, a_model
from runtime.test_unit_agents import hit_many

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="there is no GPU"),
    pytest.mark.skipif(torch.cuda.is_initialized(), reason="run this file alone"),
]
STEPS = 80
HITS = int(os.environ.get("GPU_HITS", "12"))
Train = Callable[[Job], None]


def train_replicas(job: Job) -> None:
    assert job.device.type == "cuda"
    model = a_model().to(job.device)
    train(job, model)


def train_units(job: Job, until: int = STEPS) -> None:
    model = a_model().to(job.device)
    shard_layers(model, job.mesh["shard"])
    train(job, model, until)


def train(job: Job, model: nn.Module, until: int = STEPS) -> None:
    torch.set_num_threads(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    job.track(model=model, optimizer=optimizer)
    data = job.batches(a_dataset(), global_batch=24, micro_batch=2)
    for step in job.steps(until=until):
        for batch in step.batches(data):
            inputs, wanted = (part.to(job.device) for part in batch)
            step.backward(nn.functional.cross_entropy(model(inputs), wanted))
            time.sleep(0.004)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def train_scaled(job: Job) -> None:
    """Train in half precision. The scaler skips a step whose gradients overflow."""
    model = a_model().to(job.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cuda")
    job.track(model=model, optimizer=optimizer, scaler=scaler)
    data = job.batches(a_dataset(), global_batch=24, micro_batch=2)
    for step in job.steps(until=STEPS):
        for batch in step.batches(data):
            inputs, wanted = (part.to(job.device) for part in batch)
            with torch.autocast("cuda", torch.float16):
                loss = nn.functional.cross_entropy(model(inputs), wanted)
            step.backward(loss, scaler=scaler)
            time.sleep(0.004)
        scaler.step(optimizer)
        scaler.update()


def start_on_gpu(monkeypatch: pytest.MonkeyPatch, script: Train, **given: Any) -> None:
    def start() -> None:
        os.environ["NCCL_HOSTID"] = f"rank-{os.getpid()}"
        os.environ["NCCL_SOCKET_IFNAME"] = "lo"
        run(script, seed=3, **given)

    forked = spawn.ForkSpawner(start)
    monkeypatch.setattr(spawn, "SubprocessSpawner", lambda _: forked)


@pytest.mark.parametrize(
    ("script", "world"), [(train_replicas, 2), (train_replicas, 3), (train_scaled, 3)]
)
async def test_the_survivors_of_a_killed_rank_go_on_in_place_and_it_joins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: Train, world: int
) -> None:
    start_on_gpu(monkeypatch, script)
    others = range(world - 1)
    async with Gang(tmp_path, world, in_place=1, save_every_steps=5, hang_seconds=60.0) as gang:
        await gang.until(lambda s: s.step >= 5)
        survivors = [gang.worker(slot) for slot in others]
        os.kill(gang.worker(world - 1), signal.SIGKILL)
        await gang.until(lambda s: any(not i.open for i in s.incidents))
        incident = gang.seen.incidents[0]
        assert (incident.cause, incident.rung, incident.steps_lost) == ("WorkerDied", "regroup", 0)
        print(script.__name__, world, {p.name: p.ms for p in incident.phases})
        await gang.until(lambda s: s.epoch == 3 and s.running)
        assert [gang.worker(slot) for slot in others] == survivors, "a survivor restarted"
        ends = await gang.reports()
        assert {r.cause for r in ends.values()} == {report.Cause.DONE}
        await assert_exact(gang, STEPS)


async def test_a_disturbed_run_equals_an_undisturbed_one_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_on_gpu(monkeypatch, train_replicas, exact_reduction=True)
    ledgers = []
    for name, victims in (("undisturbed", ()), ("disturbed", (2, 0))):
        folder = tmp_path / name
        await asyncio.to_thread(folder.mkdir)
        async with Gang(folder, 3, in_place=1, save_every_steps=5, hang_seconds=60.0) as gang:
            for number, slot in enumerate(victims):
                at = 5 + gang.seen.step
                await gang.until(lambda s, at=at: s.step >= at and s.running)
                os.kill(gang.worker(slot), signal.SIGKILL)
                whole = 3 + 2 * number
                await gang.until(lambda s, whole=whole: s.epoch == whole and s.running)
            await gang.reports()
            await assert_exact(gang, STEPS)
            found = await verify.load_ledger(gang.store())
        ledgers.append([(e.step, e.losses) for e in found])
    assert ledgers[0] == ledgers[1]


async def test_a_lost_unit_comes_back_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_on_gpu(monkeypatch, train_units)
    settings: dict[str, Any] = {"mesh": Mesh(shard=2), "in_place": 1, "save_every_steps": 5}
    async with Gang(tmp_path, 4, hang_seconds=60.0, **settings) as gang:
        await gang.until(lambda s: s.step >= 5)
        survivors = [gang.worker(slot) for slot in (0, 1)]
        os.kill(gang.worker(3), signal.SIGKILL)
        await gang.until(lambda s: any(not i.open for i in s.incidents))
        incident = gang.seen.incidents[0]
        print("unit", {p.name: p.ms for p in incident.phases}, incident.rung, incident.message)
        assert (incident.rung, incident.steps_lost) == ("regroup", 0)
        await gang.until(lambda s: s.epoch == 3 and s.running)
        assert [gang.worker(slot) for slot in (0, 1)] == survivors
        await gang.reports()
        await assert_exact(gang, STEPS)


async def test_ranks_of_units_killed_or_stopped_at_random_moments_cost_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_on_gpu(monkeypatch, partial(train_units, until=10**6))
    async with Gang(tmp_path, 6, mesh=Mesh(shard=2), in_place=1, hang_seconds=60.0) as gang:
        await hit_many(gang, 6, HITS)

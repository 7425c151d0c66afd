"""Two units of two real ranks under real agents: FSDP2 within a unit, Everstep between them."""

import asyncio
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import everstep
from agent.gang import Gang
from everstep import Job, run
from everstep_agent import storage
from everstep_agent.pod import spawn
from everstep_agent.tools import verify
from everstep_contract import levels
from everstep_contract.units import Mesh
from runtime.test_ranks import a_dataset, a_model

STEPS, EVERY, AT = 12, 4, 6


def a_script(job: Job, gate: Path) -> None:
    """In step 7 each rank waits for the gate between a forward and its backward."""
    torch.set_num_threads(1)
    model = a_model()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=job.mesh["shard"])
    fully_shard(model, mesh=job.mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    job.track(model=model, optimizer=optimizer)
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
    folder: Path, monkeypatch: pytest.MonkeyPatch, killed: tuple[int, ...] = ()
) -> tuple[list[Any], levels.Seen, str]:
    """The ledger, the last `seen`, what the agents logged. These ranks are killed in step 7."""
    await asyncio.to_thread(folder.mkdir)
    gate = folder / "gate"
    forked = spawn.ForkSpawner(lambda: run(lambda job: a_script(job, gate), seed=3))
    monkeypatch.setattr(spawn, "SubprocessSpawner", lambda _: forked)
    async with Gang(folder, 4, mesh=Mesh(shard=2), in_place=1, save_every_steps=EVERY) as gang:
        await gang.until(lambda s: s.step >= AT and s.committed and s.committed.step >= EVERY)
        for rank in killed:
            os.kill(gang.worker(rank), signal.SIGKILL)
        gate.touch()
        await gang.reports()
        seen, shown = gang.seen, gang.shown()
    store = storage.open_store(f"file://{folder}/store", "ns/job", {})
    return [replace(e, epoch=0) for e in await verify.load_ledger(store)], seen, shown


async def train_undisturbed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: dict[str, Any]
) -> list[Any]:
    if not undisturbed:
        undisturbed["ledger"], _, _ = await train(folder, monkeypatch)
    found: list[Any] = undisturbed["ledger"]
    return found


@pytest.mark.parametrize(
    ("killed", "lost"), [((3,), 0), ((1, 2), AT - EVERY)], ids=["one unit", "both units"]
)
async def test_a_whole_unit_saves_and_without_one_all_go_back_to_the_commit(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    undisturbed: dict[str, Any],
    killed: tuple[int, ...],
    lost: int,
) -> None:
    expected = await train_undisturbed(tmp_path / "undisturbed", monkeypatch, undisturbed)
    ledger, seen, shown = await train(tmp_path / "disturbed", monkeypatch, killed)
    assert [e.step for e in ledger] == list(range(1, STEPS + 1))
    assert ledger == expected, "bit for bit"
    assert sum(i.steps_lost for i in seen.incidents) == lost, shown
    loaded = await asyncio.to_thread(everstep.load, f"file://{tmp_path}/disturbed/store/ns/job")
    alone = a_model()
    alone.load_state_dict(loaded["model"])
    assert loaded.step == STEPS

"""How long the members' step takes when another member joins and when it leaves, by the size of the state:

EVERSTEP_JOIN_MIB=256 EVERSTEP_JOIN_STEP=1.0 pytest -m long -s tests/runtime/test_join_pause.py

With EVERSTEP_JOIN_FROZEN=1 the state is weights that are not trained, which the newcomer's script creates as well.
"""

import os
import re
import statistics
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from agent.gang import Gang, assert_exact
from everstep import Job, run
from everstep_agent.pod import spawn
from everstep_contract import levels
from runtime.test_ranks import a_dataset, a_model

MIB = int(os.environ.get("EVERSTEP_JOIN_MIB", "64"))
STEP = float(os.environ.get("EVERSTEP_JOIN_STEP", "0.3"))
"""Seconds per step of two ranks. They sleep, so the cores are free for the transfer."""
FROZEN = os.environ.get("EVERSTEP_JOIN_FROZEN", "0") == "1"
JOINS = int(os.environ.get("EVERSTEP_JOIN_RUNS", "3"))


def a_script_with_ballast(job: Job, folder: Path) -> None:
    """The ballast is parameters without gradients, with Adam's moments or (`FROZEN`) without."""
    model = a_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    ballast = nn.ParameterList(
        nn.Parameter(torch.zeros(2**20), requires_grad=False)
        for _ in range(MIB // (4 if FROZEN else 12))
    )
    if not FROZEN:
        optimizer.add_param_group({"params": list(ballast)})
    for held in () if FROZEN or job._session.start.join else ballast:
        moments = {n: torch.zeros_like(held) for n in ("exp_avg", "exp_avg_sq")}
        optimizer.state[held] = {"step": torch.tensor(1.0), **moments}
    job.track(model=model, optimizer=optimizer, ballast=ballast)
    data = job.batches(a_dataset(), global_batch=24, micro_batch=2)
    last = time.monotonic()
    with (folder / f"steps.{os.getpid()}").open("a", buffering=1) as lines:
        for step in job.steps(until=10**6):
            for inputs, wanted in step.batches(data):
                step.backward(nn.functional.cross_entropy(model(inputs), wanted))
                time.sleep(STEP / 6)
            optimizer.step()
            now = time.monotonic()
            print(step.number, job.world_size, now - last, file=lines)
            last = now


async def until_whole(gang: Gang, world: int) -> None:
    def is_so(seen: levels.Seen) -> bool:
        whole = seen.running and len(seen.members) == world
        return whole and all(not i.open for i in seen.incidents)

    step = (await gang.until(is_so)).step
    await gang.until(lambda s: is_so(s) and s.step > step + 2)


async def join_and_leave(gang: Gang, attempt: int) -> None:
    gang.want(want_workers=3, max_workers=3)
    await gang.start(2, attempt)
    await until_whole(gang, 3)
    gang.want(want_workers=2, leave=(2,))
    await gang.until(lambda s: any(a.attempt == attempt for a in s.left))
    await gang.kill(2)
    gang.want(leave=(), gone=(levels.SlotAttempt(slot=2, attempt=attempt),))
    await until_whole(gang, 2)


def read_longest(folder: Path) -> tuple[float, list[float], list[float]]:
    """The median step of two ranks, and for each of them the longest step around each join and each leave."""
    alone: list[float] = []
    joins: list[float] = []
    leaves: list[float] = []
    for path in folder.glob("steps.*"):
        steps = [line.split() for line in path.read_text().splitlines()]
        if not steps or steps[0][0] != "1":
            continue  # a newcomer
        worlds, seconds = [int(s[1]) for s in steps], [float(s[2]) for s in steps]
        alone += [s for s, world in zip(seconds, worlds, strict=True) if world == 2]
        for i in range(1, len(steps)):
            if worlds[i] != worlds[i - 1]:
                (joins if worlds[i] > worlds[i - 1] else leaves).append(max(seconds[i - 1 : i + 2]))
    return statistics.median(alone), sorted(joins), sorted(leaves)


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_what_joins_and_leaves_cost_the_members(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawner = spawn.ForkSpawner(lambda: run(lambda job: a_script_with_ballast(job, tmp_path)))
    monkeypatch.setattr(spawn, "SubprocessSpawner", lambda _: spawner)
    async with Gang(tmp_path, 2, in_place=1, hang_seconds=60.0) as gang:
        await gang.until(lambda s: s.step >= 3)
        for attempt in range(JOINS):
            await join_and_leave(gang, attempt)
        await assert_exact(gang, await gang.suspend())
        shown_log = gang.shown()
    step, joins, leaves = read_longest(tmp_path)
    assert len(joins) == 2 * JOINS
    joined, left = (", ".join(f"{s:.2f}" for s in found) for found in (joins, leaves))
    took = re.findall(r"event=state_taken .*?bytes=(\d+) ms=(\d+)", shown_log)
    taken = ", ".join(
        f"{int(count) / 2**20:.0f} MiB in {int(ms) / 1000:.2f} s" for count, ms in took
    )
    print(f"{MIB} MiB, step {step:.2f} s; received {taken}")
    print(f"longest around each join: {joined} s; around each leave: {left} s")

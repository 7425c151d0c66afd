"""The same deaths with real agents, a real store and a real run log, from `Start` to `done`."""

import asyncio
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.gang import Gang
from everstep import Job, run
from everstep_agent import storage
from everstep_agent.pod import spawn
from everstep_agent.tools import verify
from everstep_contract import levels
from runtime.test_recovery import CASES, STEPS, Case, a_script, set_the_trap

LIMIT = 120.0
QUICK, LATER = ("computing-3", "applied-2"), ("reduced-4",)
CHOSEN = [
    *(c for c in CASES if c.name.startswith(QUICK)),
    *(pytest.param(c, marks=pytest.mark.long) for c in CASES if c.name.startswith(LATER)),
]


def a_worker(case: Case, body: Path, trap: bool) -> Callable[[], None]:
    """Return what a forked worker runs. Each run of the script's body writes a line to a file."""

    def main(job: Job) -> None:
        mark = "first" if trap and job._session.start.epoch == 1 else "later"
        before = set_the_trap(case) if mark == "first" else lambda job: None
        sys.stdout = body.open("a", buffering=1)
        a_script(case, mark, before)(job)

    return lambda: run(main, seed=2)


async def the_run(folder: Path, case: Case, monkeypatch: pytest.MonkeyPatch, trap: bool) -> Any:
    """Run to `done`; return the ledger along the lineage, the last `seen`, and the body's lines."""
    await asyncio.to_thread(folder.mkdir)
    body = folder / "body"
    forked = spawn.ForkSpawner(a_worker(case, body, trap))
    monkeypatch.setattr(spawn, "SubprocessSpawner", lambda _: forked)
    async with Gang(folder, case.world, on_loss="Wait") as gang:
        async with asyncio.timeout(LIMIT):
            while not gang.seen.done:
                assert gang.seen.failure is None, gang.seen.failure
                await asyncio.sleep(0.05)
            for task in gang.tasks.values():
                await task
        seen = gang.seen
    store = storage.open_store(f"file://{folder}/store", "ns/job", {})
    ledger = await verify.load_ledger(store)
    return (
        [replace(e, epoch=0) for e in ledger],
        seen,
        (await asyncio.to_thread(body.read_text)).splitlines(),
    )


@pytest.mark.parametrize("case", CHOSEN, ids=lambda case: case.name)
async def test_a_killed_rank_costs_no_step_under_real_agents(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _, whole = await the_run(tmp_path / "undisturbed", case, monkeypatch, trap=False)
    ledger, seen, body = await the_run(tmp_path / "disturbed", case, monkeypatch, trap=True)
    assert [e.step for e in ledger if e.reduction == 0] == list(range(1, STEPS + 1))
    assert ledger == expected
    incident = the_incident(seen)
    assert (incident.cause, incident.steps_lost) == ("WorkerDied", 0)
    lived = [line.split() for line in body]
    counted = [
        (rank, int(step), drawn)
        for mark, rank, step, drawn in lived
        if (mark == "later") == (int(step) > incident.step)
    ]
    assert len({(rank, step) for rank, step, _ in counted}) == len(counted)
    assert {c[1:] for c in counted} == {(int(s), d) for _, _, s, d in map(str.split, whole)}


def the_incident(seen: levels.Seen) -> levels.RuntimeIncident:
    (incident,) = seen.incidents
    return incident

"""examples/llama in the lab, with fewer steps than in its manifest. A rank of one of its two units is killed."""

import asyncio
import os
import re
import signal
from pathlib import Path

import pytest
import yaml

from everstep_demo.board import Board
from everstep_demo.runwatch import RunWatch
from everstep_demo.trial import NAMESPACE, Trial
from everstep_lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.long, pytest.mark.timeout(900)]
MANIFEST = Path(__file__).parents[2] / "examples" / "llama" / "job.yaml"
NAME, SLOT, STEPS, BATCH = "llama", 3, 60, 16


def read_manifest() -> dict:
    job: dict = yaml.safe_load(MANIFEST.read_text())
    (container,) = job["spec"]["workers"]["template"]["spec"]["containers"]
    (steps,) = (e for e in container["env"] if e["name"] == "LLAMA_STEPS")
    steps["value"] = str(STEPS)
    return job


async def find_rank(lab: Lab, pod: str) -> int:
    said = await asyncio.to_thread(lab.kubectl, "-n", NAMESPACE, "logs", pod)
    return int(re.findall(r"event=worker_runs .*\bpid=(\d+)", said)[-1])


async def test_the_llama_loses_a_unit_gets_it_back_and_trains_to_its_end(
    lab: Lab, board: Board
) -> None:
    job = read_manifest()
    await board.create(job)
    uri = job["spec"]["checkpoint"]["uri"]
    trial = Trial(NAME, board, RunWatch(uri, f"{NAMESPACE}/{NAME}", lab.store_environment))
    try:
        epoch = await trial.until_stepping(limit=240)
        before = await trial.members()
        pod = await board.current_pod(NAME, SLOT)
        assert pod is not None
        os.kill(await find_rank(lab, pod.name), signal.SIGKILL)
        await trial.until_recovered(epoch, limit=240)
        now = await trial.members()
        assert {slot for slot in now if now[slot] != before[slot]} == {2, 3}

        await trial.until_condition("Complete", limit=400)
        assert await trial.steps_lost() == 0
        (incident,) = (i for i in await trial.incidents() if i["cause"] == "WorkerDied")
        assert incident["rung"] == "regroup", incident
        entries = await trial.watch.ledger()
        assert [e.step for e in entries] == list(range(1, STEPS + 1))
        assert all(count == 1 for e in entries for count in e.counts)
        samples = [sample for e in entries for sample in e.samples]
        assert len(samples) == len(set(samples)) == STEPS * BATCH
    finally:
        await board.delete(NAME)

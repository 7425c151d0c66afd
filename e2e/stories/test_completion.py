"""A job without faults: it trains, becomes Complete, and passes `everstep verify`."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from everstep_demo.board import condition, is_true
from everstep_stories.jobs import BATCH, URI
from everstep_stories.scene import Scene

pytestmark = pytest.mark.timeout(300)
STEPS = 120


async def test_a_job_trains_to_its_end(scene: Scene) -> None:
    job = scene.build_job("happy", steps=STEPS)
    with scene.timed("applied → first step"):
        trial = await scene.start(job)
        await trial.until_stepping(limit=120)
    with scene.timed("first step → Complete"):
        complete = await trial.until_condition("Complete", limit=120)
    assert complete["reason"] == "Done"
    assert str(STEPS) in complete["message"]
    job = await trial.job()
    assert job["status"]["state"] == "Complete"
    assert job["status"]["step"] == STEPS
    assert not is_true(job, "Running")
    assert not is_true(job, "Failed")
    health = condition(job, "CheckpointHealthy")
    assert health is not None
    assert health["status"] == "True", health
    account = await scene.check_samples(trial)
    assert account.steps == STEPS
    reasons = {e["reason"] for e in await scene.board.events("happy")}
    assert "Done" in reasons, reasons
    said = await asyncio.to_thread(_verify, scene, "happy")
    assert f"steps 1 to {STEPS} once each, {STEPS * BATCH} samples" in said
    scene.recorder.say("verify", said.strip().splitlines()[-1])
    await scene.board.delete("happy")


def _verify(scene: Scene, name: str) -> str:
    """Run `everstep verify` as a user with the store's credentials."""
    command = Path(sys.executable).parent / "everstep"
    done = subprocess.run(
        [command, "verify", f"{URI}/{scene.namespace}/{name}"], text=True, capture_output=True,
        timeout=60, check=False, env={**os.environ, **scene.cluster.store_environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout

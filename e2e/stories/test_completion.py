"""A job without faults: it trains, becomes Complete, and passes `everstep verify`."""

import pytest

from everstep_demo.board import condition, is_true
from everstep_stories.jobs import BATCH
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
    said = await scene.verify(trial)
    assert f"steps 1 to {STEPS} once each, {STEPS * BATCH} samples" in said
    await scene.board.delete("happy")

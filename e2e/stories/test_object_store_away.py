"""The object store is down for half a minute: steps continue, commits wait, and a condition reports it."""

import asyncio

import pytest

from everstep_demo.board import condition
from everstep_demo.trial import Trial
from everstep_stories.scene import Scene

pytestmark = pytest.mark.timeout(300)
AWAY_SECONDS = 25.0


async def test_steps_continue_and_commits_wait(scene: Scene, survivor: Trial) -> None:
    epoch = await survivor.until_stepping()
    await scene.stop_store()
    scene.recorder.say("store", "stopped")
    await scene.until_further(survivor, 20)
    await asyncio.sleep(AWAY_SECONDS)
    await scene.until_further(survivor, 20)

    async def reported() -> bool:
        health = condition(await survivor.job(), "CheckpointHealthy")
        return health is not None and health["status"] == "False"

    # The run log cannot be read now, so this wait must not use it.
    async with asyncio.timeout(40):
        while not await reported():
            await asyncio.sleep(0.3)
    health = condition(await survivor.job(), "CheckpointHealthy")
    assert health is not None
    scene.recorder.say("condition", f"{health['reason']}: {health['message']}")
    committed = survivor.watch.committed
    await scene.start_store()

    async def healthy() -> bool:
        await survivor.watch.refresh()
        now = condition(await survivor.job(), "CheckpointHealthy")
        return survivor.watch.committed > committed and now is not None and now["status"] == "True"

    with scene.timed("store back → commits again"):
        await survivor.until("commits again", healthy, limit=90)
    assert survivor.watch.epoch == epoch
    scene.recorder.outcome.steps_lost = 0
    await scene.check_samples(survivor)

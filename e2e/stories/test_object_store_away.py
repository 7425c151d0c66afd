"""The object store is down for half a minute: steps continue, commits wait, and a condition reports it."""

import asyncio

import pytest

from everstep_demo.trial import Trial
from everstep_stories.scene import Scene
from everstep_stories.without_store import check_recovery, until_reported

pytestmark = pytest.mark.timeout(300)
AWAY_SECONDS = 25.0


async def test_steps_continue_and_commits_wait(scene: Scene, survivor: Trial) -> None:
    epoch = await survivor.until_stepping()
    await scene.stop_store()
    scene.recorder.say("store", "stopped")
    await scene.until_further(survivor, 20)
    await asyncio.sleep(AWAY_SECONDS)
    await scene.until_further(survivor, 20)
    health = await until_reported(survivor, limit=40)
    scene.recorder.say("condition", f"{health['reason']}: {health['message']}")
    await check_recovery(scene, survivor, epoch)

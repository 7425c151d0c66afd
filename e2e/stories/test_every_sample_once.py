"""After all its stories the ledger of the job `survivor` has no gap, and deleting the job removes its pods."""

import asyncio

import pytest

from everstep_demo.trial import Trial
from everstep_stories.scene import Scene

pytestmark = pytest.mark.timeout(300)


async def test_the_survivor_used_every_sample_once(scene: Scene, survivor: Trial) -> None:
    account = await scene.check_samples(survivor)
    assert account.steps > 100
    scene.recorder.outcome.steps_lost = await survivor.steps_lost()
    await scene.board.delete(survivor.name)

    with scene.timed("deleted → no pods"):
        async with asyncio.timeout(60):
            while await scene.board.pods(survivor.name):
                await asyncio.sleep(0.3)

"""A node loses power, and a warm spare takes the place of its pod; the lost slot's next pod is the
new spare.
"""

import pytest

from everstep_demo.story import MOVED
from everstep_stories import power
from everstep_stories.scene import Scene

pytestmark = pytest.mark.timeout(600)
NAME, SIZE = "warm", 3


async def test_the_spare_takes_the_place(scene: Scene) -> None:
    trial = await power.start(scene, power.build_job(scene, NAME, replicas=SIZE, spares=1))
    (spare,) = (await trial.job())["status"]["spares"]["slots"]
    slot = next(s for s in range(SIZE + 1) if s != spare)
    lost = await power.find_pod(scene, trial, slot)
    scene.recorder.say("spare", f"slot {spare}")
    seen = await power.lose(scene, trial, [lost])
    assert MOVED not in seen.reached, "it is whole before the lost slot has its next pod"
    assert set(await trial.members()) == set(range(SIZE + 1)) - {slot}
    with scene.timed("full size → the next spare"):
        await power.until_size(trial, SIZE, spares=1)
    assert (await trial.job())["status"]["spares"]["slots"] == [slot]
    await scene.board.delete(NAME)

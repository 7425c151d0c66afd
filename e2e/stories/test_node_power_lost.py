"""A node loses power, and nothing reports it. A majority trains on without it at once, a half as
soon as the run log allows it. The lost pod is replaced on another node before Kubernetes has given
the node up.
"""

import pytest

from everstep_demo.story import FIRST_STEP, MOVED
from everstep_stories import power
from everstep_stories.scene import Scene

pytestmark = pytest.mark.timeout(600)


async def test_a_majority_steps_on(scene: Scene) -> None:
    """The lost node is the coordinator's."""
    trial = await power.start(scene, power.build_job(scene, "majority", replicas=3))
    held = (await trial.job())["status"].get("coordinator")
    slot = int(held) if str(held).isdigit() else 0
    seen = await power.lose(scene, trial, [await power.find_pod(scene, trial, slot)])
    assert seen.reached[FIRST_STEP] < seen.reached[MOVED], "it waits for no other pod"
    await scene.board.delete(trial.name)


async def test_a_half_steps_on_by_the_yield(scene: Scene) -> None:
    """The lost node has the lowest slot; a half with that slot could continue at once."""
    trial = await power.start(scene, power.build_job(scene, "half", replicas=2))
    lost = await power.find_pod(scene, trial, 0)
    async with power.hearing(trial) as said:
        await power.lose(scene, trial, [lost])
    text = power.told_of_silence(said)
    assert lost.node in text, said
    assert "recovery.replaceAfterSeconds" in text, said
    await scene.board.delete(trial.name)

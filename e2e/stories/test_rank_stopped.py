"""SIGSTOP of a rank in its container: the others train on without it, and a new rank starts in the
same pod.
"""

import pytest

from everstep_demo.board import Pod
from everstep_demo.trial import Trial
from everstep_stories.ranks import find_rank
from everstep_stories.scene import Scene

pytestmark = pytest.mark.timeout(300)
SLOT, STEPS = 1, 60
"""After STEPS steps a rank knows how long a step takes."""


async def test_a_rank_that_stops_costs_no_step(scene: Scene, survivor: Trial) -> None:
    before = await scene.choose_pod(survivor, SLOT)
    await scene.until_further(survivor, STEPS)
    pid = await find_rank(scene, before)
    restarts = (await survivor.job())["status"]["restarts"]

    async def stop(pod: Pod) -> None:
        await scene.kubectl("exec", pod.name, "--", "sh", "-c", f"kill -STOP {pid}")

    await scene.play(
        survivor, f"SIGSTOP of the rank in {before.name}", stop, slot=before.slot, pod_stays=True
    )
    assert scene.recorder.outcome.steps_lost == 0
    after = await scene.board.current_pod(survivor.name, before.slot)
    assert after is not None
    assert (after.name, after.restarts) == (before.name, before.restarts)
    assert await find_rank(scene, after) != pid
    incident = (await survivor.incidents())[-1]
    assert (incident["cause"], incident["slot"]) == ("NoProgress", before.slot), incident
    scene.recorder.say("told", incident["message"])
    assert await scene.board.quarantines() == []
    budgets = (await survivor.job())["status"]["restarts"].get("recent", [])
    assert budgets == restarts.get("recent", []), "a cut by a learnt limit uses no budget"
    await scene.check_samples(survivor)

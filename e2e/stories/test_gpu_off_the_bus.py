"""XID 79: the rank dies at once, the job continues without a lost step, and the slot moves to
another node.
"""

import pytest

from everstep_demo.trial import Trial
from everstep_stories.scene import Scene

pytestmark = pytest.mark.timeout(300)


async def test_a_gpu_that_fell_off_the_bus_costs_no_step(scene: Scene, survivor: Trial) -> None:
    before = await scene.choose_pod(survivor, 0)
    title = f"XID 79 on slot {before.slot}'s GPU"
    seen = await scene.play(survivor, title, lambda pod: scene.break_gpu(pod, 79), slot=before.slot)
    assert scene.recorder.outcome.steps_lost == 0
    assert seen.moved_to != before.node

    async def quarantined() -> bool:
        found = [q["spec"] for q in await scene.board.quarantines()]
        return [(q["nodeName"], q["verdict"]) for q in found] == [(before.node, "Gone")]

    await survivor.until("the node in quarantine, verdict Gone", quarantined, limit=30)
    await scene.check_samples(survivor)

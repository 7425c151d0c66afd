"""XID 64, a failed row remap: the job saves and moves, the node is cordoned, no step is lost.

The end of the story releases the node (`Scene.tidy`).
"""

import pytest

from everstep_demo.trial import Trial
from everstep_stories.scene import Scene

pytestmark = pytest.mark.timeout(300)


async def test_the_job_saves_leaves_the_node_and_loses_nothing(
    scene: Scene, survivor: Trial
) -> None:
    before = await scene.board.current_pod(survivor.name, 1)
    assert before is not None
    seen = await scene.play(
        survivor, "XID 64 on slot 1's GPU", lambda pod: scene.break_gpu(pod, 64), slot=1
    )
    assert scene.recorder.outcome.steps_lost == 0
    assert seen.moved_to
    assert seen.moved_to != before.node
    after = await scene.board.current_pod(survivor.name, 1)
    assert after is not None
    assert after.attempt == before.attempt + 1
    assert (await scene.board.nodes())[before.node].cordoned
    found = [q["spec"] for q in await scene.board.quarantines()]
    assert [q["nodeName"] for q in found] == [before.node]
    assert found[0]["verdict"] == "Leaving"
    assert "64" in str(found[0])
    incident = (await survivor.job())["status"]["incidents"][-1]
    assert incident["node"] == before.node
    assert {m["name"] for m in incident["marks"]} >= {"verdict", "left"}
    reasons = {e["reason"] for e in await scene.board.events(survivor.name)}
    assert "NodeLeaving" in reasons, reasons
    await scene.check_samples(survivor)

"""A rank takes more memory than its container may use, and the kernel kills only that rank. The
other rank trains on, a new rank in the same container joins it, and the incident says why the rank
died.
"""

import pytest

from everstep_stories import hungry
from everstep_stories.scene import Scene

pytestmark = pytest.mark.timeout(300)
NAME, SLOT = "hungry-rank", 1


async def test_the_incident_names_the_limit(scene: Scene) -> None:
    trial = await hungry.run_rank(scene, NAME, SLOT)
    assert await trial.restarted_containers() == 0
    (incident,) = await trial.incidents()
    scene.recorder.say("incident", f"{incident['cause']}: {incident['message']}")
    assert (incident["cause"], incident["rung"]) == ("WorkerDied", "regroup"), incident
    assert (
        "killed by signal 9 (SIGKILL), out of memory: raise resources.limits.memory"
        in incident["message"]
    )
    assert "1.1 GiB" in incident["message"], "the template's 1 Gi, and checkpoint.stagingMemory"
    scene.recorder.outcome.steps_lost = await trial.steps_lost()
    assert scene.recorder.outcome.steps_lost == 0
    assert await scene.board.quarantines() == []
    assert (await scene.check_samples(trial)).steps == hungry.STEPS
    await scene.board.delete(NAME)

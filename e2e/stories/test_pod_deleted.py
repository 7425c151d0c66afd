"""`kubectl delete pod`: the job saves within the grace period, and the slot's next pod continues."""

import pytest

from everstep_demo.board import Pod
from everstep_demo.trial import Trial
from everstep_stories.scene import Scene

pytestmark = pytest.mark.timeout(300)


async def test_a_deleted_pod_saves_first_and_comes_back(scene: Scene, survivor: Trial) -> None:
    before = await scene.board.current_pod(survivor.name, 1)
    assert before is not None

    async def delete(pod: Pod) -> None:
        await scene.kubectl("delete", "pod", pod.name, "--wait=false")

    await scene.play(survivor, f"kubectl delete pod {before.name}", delete, slot=1)
    assert scene.recorder.outcome.steps_lost == 0
    after = await scene.board.current_pod(survivor.name, 1)
    assert after is not None
    assert after.attempt == before.attempt + 1
    incident = (await survivor.job())["status"]["incidents"][-1]
    assert incident["cause"] == "PodDeleted"
    assert await scene.board.quarantines() == []
    await scene.check_samples(survivor)

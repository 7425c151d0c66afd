"""`kubectl delete pod`: the job saves within the grace period, and another pod takes the place."""

import pytest

from everstep_demo.board import Pod
from everstep_demo.trial import Trial
from everstep_stories.scene import Scene

pytestmark = pytest.mark.timeout(300)
SLOT = 1


async def test_a_deleted_pod_saves_first_and_comes_back(scene: Scene, survivor: Trial) -> None:
    before = await scene.board.pods(survivor.name)
    deleted = await scene.choose_pod(survivor, SLOT)

    async def delete(pod: Pod) -> None:
        await scene.kubectl("delete", "pod", pod.name, "--wait=false")

    await scene.play(survivor, f"kubectl delete pod {deleted.name}", delete, slot=deleted.slot)
    assert scene.recorder.outcome.steps_lost == 0
    known = {pod.name for pod in before}
    after = {pod.name for pod in await scene.board.pods(survivor.name)}
    assert after - known, "a new pod, perhaps of the slot of a spare that has taken a lost place"
    incident = (await survivor.job())["status"]["incidents"][-1]
    assert incident["cause"] == "PodDeleted"
    assert await scene.board.quarantines() == []
    await scene.check_samples(survivor)

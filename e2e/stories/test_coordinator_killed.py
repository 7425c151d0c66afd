"""The coordinator's pod is killed without warning: another agent takes over the role, and no step is lost."""

import pytest

from everstep_demo.board import Pod
from everstep_demo.trial import Trial
from everstep_stories.scene import Scene

pytestmark = pytest.mark.timeout(300)


async def test_the_role_moves_on_and_no_step_is_lost(scene: Scene, survivor: Trial) -> None:
    held = (await survivor.job())["status"].get("coordinator")
    slot = int(held) if str(held).isdigit() else 0
    before = await scene.board.current_pod(survivor.name, slot)
    assert before is not None

    async def kill(pod: Pod) -> None:
        await scene.kubectl("delete", "pod", pod.name, "--force", "--grace-period=0")

    await scene.play(survivor, f"kubectl delete --force {before.name}", kill, slot=slot)
    assert scene.recorder.outcome.steps_lost == 0
    await scene.check_samples(survivor)

"""A node loses power on the lab: its pod is replaced before Kubernetes has given the node up."""

import pytest

from everstep_demo.trial import Trial
from lifecycle.scene import LIMIT, Scene

pytestmark = [pytest.mark.lab, pytest.mark.long, pytest.mark.timeout(900)]
NEVER = 3600
"""A nodeLostSeconds that outlasts the test: waiting for the loss of the node would end it."""
RECOVERY = {"nodeLostSeconds": NEVER, "replaceAfterSeconds": 10}


@pytest.mark.parametrize(("replicas", "slot"), [(3, 2), (2, 0)], ids=["majority", "half"])
async def test_a_lost_pod_is_replaced_before_its_node_counts_as_lost(
    scene: Scene, replicas: int, slot: int
) -> None:
    """A majority steps on by itself; the half without the lowest slot needs the operator's yield."""
    trial = await scene.start(
        "silent", replicas=replicas, workers={"minReplicas": 1}, spec={"recovery": RECOVERY}
    )
    await scene.stepping(trial)
    pod = await scene.board.current_pod(trial.name, slot)
    assert pod is not None
    scene.lab.fault(pod.node, kill_node=True)
    if replicas == 2:
        await _told_to_wait(scene, trial, pod.node)
    await trial.until_replaced(pod, limit=LIMIT)
    back = await scene.board.current_pod(trial.name, slot)
    assert back is not None
    assert (back.attempt, back.node != pod.node) == (pod.attempt + 1, True)
    status = (await trial.job())["status"]
    assert status["restarts"]["byCause"] == {"NodeLost": 1}
    assert await trial.steps_lost() == 0
    assert not await scene.board.quarantines()


async def _told_to_wait(scene: Scene, trial: Trial, node: str) -> None:
    said = await scene.told(trial, "NodeSilent")
    assert node in said
    assert "recovery.replaceAfterSeconds" in said

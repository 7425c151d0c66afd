"""The leader is killed: training continues; the other replica takes over and completes the recovery."""

import asyncio
import time

import pytest

from everstep_demo.board import Pod
from everstep_demo.trial import Trial
from everstep_stories.clusters import NotHereError
from everstep_stories.scene import Scene
from everstep_stories.system import NAMESPACE

pytestmark = pytest.mark.timeout(300)


async def test_the_other_replica_takes_over_in_the_middle_of_a_recovery(
    scene: Scene, survivor: Trial
) -> None:
    if not scene.system.by_helm:
        raise NotHereError("the local lab has one replica")
    before = await scene.board.pods(survivor.name)
    leader, _ = await scene.system.until_leader()

    async def kill(pod: Pod) -> None:
        await scene.kubectl("delete", "pod", pod.name, "--wait=false")
        began = time.monotonic()
        await asyncio.to_thread(
            scene.cluster.kubectl, "delete", "pod", leader, "-n", NAMESPACE, "--grace-period=0",
            "--force",
        )  # fmt: skip
        successor, _ = await scene.system.until_leader(other_than=leader)
        scene.recorder.phase("leader killed → next leader", time.monotonic() - began, successor)

    await scene.play(survivor, f"leader {leader} killed in a recovery", kill, slot=before[-1].slot)
    assert scene.recorder.outcome.steps_lost == 0
    known = {pod.name for pod in before}
    new = [pod for pod in await scene.board.pods(survivor.name) if pod.name not in known]
    assert len(new) == 1, "the two leaders must create one pod together"
    await scene.check_samples(survivor)


async def test_a_deleted_leader_hands_over_at_once(scene: Scene, survivor: Trial) -> None:
    if not scene.system.by_helm:
        raise NotHereError("the local lab has one replica")
    epoch = await survivor.until_stepping()
    leader, _ = await scene.system.until_leader()
    began = time.monotonic()
    await asyncio.to_thread(
        scene.cluster.kubectl, "delete", "pod", leader, "-n", NAMESPACE, "--wait=false"
    )
    successor, _ = await scene.system.until_leader(other_than=leader, limit=20)
    took = time.monotonic() - began
    scene.recorder.phase("leader deleted → next leader", took, successor)
    await scene.until_further(survivor)
    assert await survivor.until_stepping() == epoch, "the epoch must not change"

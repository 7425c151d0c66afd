"""`kubectl drain`: the job saves and moves, the drain completes, and no step is lost."""

import asyncio

import pytest

from everstep_demo.board import Pod
from everstep_demo.trial import Trial
from everstep_stories.scene import Scene

pytestmark = pytest.mark.timeout(300)
DRAIN_SECONDS = 90


async def test_the_job_leaves_a_drained_node_after_a_save(scene: Scene, survivor: Trial) -> None:
    before = await scene.choose_pod(survivor, 0)
    drains: list[asyncio.Task[str]] = []

    async def drain(pod: Pod) -> None:
        selector = f"--pod-selector=everstep.dev/job={survivor.name}"
        command = ("drain", pod.node, "--ignore-daemonsets", "--delete-emptydir-data", selector)
        limit = f"--timeout={DRAIN_SECONDS}s"
        drains.append(asyncio.create_task(scene.kubectl(*command, limit, timeout=120)))

    try:
        seen = await scene.play(survivor, f"kubectl drain {before.node}", drain, slot=before.slot)
        assert "drained" in await drains[0]
        assert scene.recorder.outcome.steps_lost == 0
        assert seen.moved_to != before.node
        moved = await scene.board.current_pod(survivor.name, before.slot)
        assert moved is not None
        assert moved.node != before.node
        assert await scene.board.quarantines() == [], (
            "an administrator's cordon must not make a quarantine"
        )
    finally:
        await scene.kubectl("uncordon", before.node)
    await scene.check_samples(survivor)

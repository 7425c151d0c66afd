"""A node is cut off from the API server and keeps training: its pod is asked to leave, and no step is written twice."""

import asyncio

import pytest

from everstep_demo.board import Pod
from everstep_demo.trial import Trial
from everstep_stories.scene import Scene

pytestmark = pytest.mark.timeout(400)


async def test_a_node_cut_off_from_the_api_server_costs_no_step(
    scene: Scene, survivor: Trial
) -> None:
    before = (await scene.board.pods(survivor.name))[-1]

    async def cut(pod: Pod) -> None:
        await scene.break_node(pod.node, partition=True)

    seen = await scene.play(
        survivor, f"{before.node} cut off from the API server", cut, slot=before.slot, limit=240
    )
    assert scene.recorder.outcome.steps_lost == 0
    assert seen.moved_to != before.node
    await asyncio.to_thread(scene.cluster.heal, before.node)
    await scene.until_further(survivor, 20)
    await scene.check_samples(survivor)

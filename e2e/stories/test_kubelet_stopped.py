"""A node freezes with all its processes and continues later: its outdated pod is fenced and changes nothing."""

import asyncio

import pytest

from everstep_demo.board import Pod
from everstep_demo.trial import Trial
from everstep_stories.clusters import NotHereError
from everstep_stories.scene import Scene

pytestmark = pytest.mark.timeout(400)


async def test_the_pod_that_comes_back_is_fenced(scene: Scene, survivor: Trial) -> None:
    if not getattr(scene.cluster, "freezes_nodes", False):
        raise NotHereError("nodes of this cluster cannot be frozen; those of the kind lab can")
    before = await scene.choose_pod(survivor, 0)

    async def stop(pod: Pod) -> None:
        await scene.break_node(pod.node, freeze_node=True)

    seen = await scene.play(survivor, f"{before.node} frozen", stop, slot=before.slot, limit=240)
    assert seen.moved_to != before.node
    await survivor.watch.refresh()
    epoch = survivor.watch.epoch
    await asyncio.to_thread(scene.cluster.heal, before.node)
    scene.recorder.say("healed", before.node)

    async def gone() -> bool:
        names = {p.name for p in await scene.board.pods(survivor.name)}
        return before.name not in names

    with scene.timed("node back → old pod deleted"):
        await survivor.until(f"{before.name} gone", gone, limit=120)
    await scene.until_further(survivor, 20)
    assert await survivor.until_stepping() == epoch, "the pod that came back must change nothing"
    await scene.check_samples(survivor)

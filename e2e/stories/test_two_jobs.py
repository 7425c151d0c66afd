"""Two jobs and too few GPUs: the second one waits with the scheduler's words, then has its turn."""

import pytest

from everstep_demo.board import condition
from everstep_stories.scene import Scene

pytestmark = pytest.mark.timeout(400)


async def test_the_second_job_waits_for_gpus_and_then_trains(scene: Scene) -> None:
    free = await _free_gpus(scene)
    assert free >= 2, f"only {free} GPUs are free"
    first = await scene.start(scene.build_job("greedy", replicas=free - 1))
    await first.until_stepping(limit=180)
    second = await scene.start(scene.build_job("patient", replicas=2, steps=60))

    async def told() -> bool:
        running = condition(await second.job(), "Running")
        return running is not None and running["reason"] == "Unschedulable"

    with scene.timed("applied → told that it waits"):
        await second.until("reason Unschedulable", told, limit=60)
    running = condition(await second.job(), "Running")
    assert running is not None
    assert "nvidia.com/gpu" in running["message"], running
    scene.teller.say("condition", running["message"][:160])
    step = await first.step()
    await scene.until_further(first, 5)
    assert await first.step() > step
    await scene.board.delete("greedy")
    with scene.timed("GPUs free → Complete"):
        await second.until_condition("Complete", limit=180)
    await scene.board.delete("patient")


async def _free_gpus(scene: Scene) -> int:
    nodes = await scene.api.list("/api/v1/nodes")
    have = sum(int(n["status"]["allocatable"].get("nvidia.com/gpu", 0)) for n in nodes)
    pods = await scene.api.list("/api/v1/pods")
    living = [p for p in pods if p["status"].get("phase") in ("Pending", "Running")]
    used = sum(
        int(c.get("resources", {}).get("limits", {}).get("nvidia.com/gpu", 0))
        for p in living
        for c in p["spec"]["containers"]
    )
    return have - used

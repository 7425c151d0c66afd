"""Two jobs, GPUs for one: the second waits, with the scheduler's message in its condition, then trains."""

import asyncio

import pytest

from everstep_demo.board import Object, condition
from everstep_demo.trial import POLL_SECONDS
from everstep_stories.scene import Scene

pytestmark = pytest.mark.timeout(400)
GPU = "nvidia.com/gpu"


async def test_the_second_job_waits_for_gpus_and_then_trains(scene: Scene) -> None:
    node, free = await _freest_node(scene)
    assert free, "no GPU is free"
    first = await scene.start(_pinned(scene.build_job("greedy", replicas=1), node, gpus=free))
    await first.until_stepping(limit=180)
    job = scene.build_job("patient", replicas=1, steps=60)
    second = await scene.start(_pinned(job, node, gpus=1))

    async def reported() -> bool:
        running = condition(await second.job(), "Running")
        return running is not None and running["reason"] == "Unschedulable"

    with scene.timed("applied → reason Unschedulable"):
        await second.until("reason Unschedulable", reported, limit=60)
    running = condition(await second.job(), "Running")
    assert running is not None
    assert GPU in running["message"], running
    scene.recorder.say("condition", running["message"][:160])
    await scene.until_further(first)
    await scene.board.delete("greedy")
    with scene.timed("GPUs free → Complete"):
        await second.until_condition("Complete", limit=180)
    await scene.board.delete("patient")


def _pinned(job: Object, node: str, *, gpus: int) -> Object:
    pod = job["spec"]["workers"]["template"]["spec"]
    pod["nodeSelector"] = {"kubernetes.io/hostname": node}
    pod["containers"][0]["resources"]["limits"][GPU] = gpus
    return job


async def _freest_node(scene: Scene) -> tuple[str, int]:
    """The node with the most free GPUs and their number, once no pod is terminating."""
    nodes = await scene.api.list("/api/v1/nodes")
    free = {n["metadata"]["name"]: int(n["status"]["allocatable"].get(GPU, 0)) for n in nodes}
    for pod in await _settled_pods(scene):
        node = pod["spec"].get("nodeName")
        if node in free and pod["status"].get("phase") in ("Pending", "Running"):
            free[node] -= sum(_gpus(c) for c in pod["spec"]["containers"])
    name = max(free, key=lambda n: free[n])
    return name, free[name]


async def _settled_pods(scene: Scene) -> list[Object]:
    """All pods, once none is terminating: a pod of the previous story would free its GPU later."""
    async with asyncio.timeout(90):
        while True:
            pods = await scene.api.list("/api/v1/pods")
            if not any("deletionTimestamp" in p["metadata"] for p in pods):
                return pods
            await asyncio.sleep(POLL_SECONDS)


def _gpus(container: Object) -> int:
    return int(container.get("resources", {}).get("limits", {}).get(GPU, 0))

"""Pods get a notice of ten seconds, as on spot nodes. No step is lost: if all pods go, they save first; if one goes
while the store is down, the other holds the state.
"""

import asyncio

import pytest

from everstep_demo.board import Object, Pod
from everstep_demo.trial import Trial
from everstep_stories.scene import Scene

pytestmark = pytest.mark.timeout(300)
NOTICE_SECONDS = 10


def build_job(scene: Scene, name: str) -> Object:
    job = scene.build_job(name)
    job["spec"]["workers"]["template"]["spec"]["terminationGracePeriodSeconds"] = NOTICE_SECONDS
    return job


async def delete(scene: Scene, trial: Trial, pods: list[Pod]) -> None:
    """Delete the pods, and wait until they are gone."""
    names = [pod.name for pod in pods]
    with scene.timed("notice → pods gone", str(len(names))):
        await scene.kubectl("delete", "pod", *names, "--wait=false")
        while {pod.name for pod in await scene.board.pods(trial.name)} & set(names):
            await asyncio.sleep(0.2)


async def check(scene: Scene, trial: Trial, moves: int) -> None:
    """Each pod left by itself, before the kubelet would have killed it."""
    assert scene.recorder.outcome.steps_lost == 0
    incidents = (await trial.job())["status"]["incidents"]
    assert [i["cause"] for i in incidents] == ["PodDeleted"] * moves
    assert all("left" in {m["name"] for m in i["marks"]} for i in incidents), incidents
    await scene.check_samples(trial)
    await scene.board.delete(trial.name)


async def test_all_pods_save_before_they_go(scene: Scene) -> None:
    trial = await scene.start(build_job(scene, "notice-all"))
    await trial.until_stepping(limit=180)

    async def delete_all(_: Pod) -> None:
        await delete(scene, trial, await scene.board.pods(trial.name))

    await scene.play(trial, "kubectl delete pod, all pods", delete_all, slot=0)
    await check(scene, trial, 2)


async def test_one_pod_goes_without_the_store(scene: Scene) -> None:
    trial = await scene.start(build_job(scene, "notice-one"))
    await trial.until_stepping(limit=180)

    async def delete_it(pod: Pod) -> None:
        await scene.stop_store()
        await delete(scene, trial, [pod])
        await scene.until_further(trial, 20)
        await scene.start_store()

    await scene.play(trial, "kubectl delete pod, the store is down", delete_it, slot=1)
    await check(scene, trial, 1)

"""An elastic job shrinks and grows with `kubectl scale`: the workers that stay are not restarted,
and every sample is still used once.
"""

import pytest

from everstep_demo.trial import Trial
from everstep_stories.scene import Scene

pytestmark = pytest.mark.timeout(300)
NAME = "elastic"


async def resized(trial: Trial, size: int) -> None:
    async def so() -> bool:
        await trial.watch.refresh()
        pods = [p for p in await trial.board.pods(NAME) if not p.deleting]
        status = (await trial.job()).get("status", {})
        world = (status.get("world") or {}).get("summary")
        return len(pods) == size and world == f"{size}/{size}" and status["state"] == "Running"

    await trial.until(f"{size} pods that train", so, limit=120)
    await trial.until_stepping()


async def test_a_job_shrinks_and_grows_by_kubectl_scale(scene: Scene) -> None:
    job = scene.build_job(NAME, replicas=2)
    job["spec"]["workers"] |= {"minReplicas": 1, "maxReplicas": 3}
    trial = await scene.start(job)
    await resized(trial, 2)
    await scene.until_further(trial, 20)
    for size in (1, 3, 2):
        before = await trial.members()
        with scene.timed(f"scale → {size}"):
            await scene.kubectl("scale", "rtj", NAME, f"--replicas={size}")
            await resized(trial, size)
        await scene.until_further(trial, 20)
        after = await trial.members()
        stayed = before.keys() & set(range(size))
        assert len(after) == size
        assert {s: after[s] for s in stayed} == {s: before[s] for s in stayed}, "nobody restarts"
    assert await trial.steps_lost() == 0
    status = (await trial.job())["status"]
    assert status["restarts"]["total"] == 0, "a wish is no interruption"
    assert await trial.restarted_containers() == 0
    scene.recorder.outcome.steps_lost = 0
    await scene.check_samples(trial)
    await scene.board.delete(NAME)

"""Suspend, edit, resume: the job saves and releases its GPUs, then continues from the saved step."""

import pytest

from everstep_stories.scene import Scene

pytestmark = pytest.mark.timeout(300)
NAME = "pausing"


async def test_a_suspended_job_releases_its_pods_and_continues_from_its_step(
    scene: Scene,
) -> None:
    trial = await scene.start(scene.build_job(NAME))
    await trial.until_stepping(limit=120)
    await scene.until_further(trial, 20)
    with scene.timed("suspend → no pods"):
        await scene.board.patch(NAME, {"spec": {"suspend": True}})
        await trial.until_condition("Suspended", limit=60)
    assert not [p for p in await scene.board.pods(NAME) if p.phase in ("Pending", "Running")]
    await trial.watch.refresh()
    saved = trial.watch.committed
    job = await trial.job()
    assert job["status"]["step"] <= saved
    container = job["spec"]["workers"]["template"]["spec"]["containers"][0]
    container["env"].append({"name": "TINY_SECONDS", "value": "0.05"})
    template = job["spec"]["workers"]["template"]
    with scene.timed("resume → first new step"):
        await scene.board.patch(
            NAME, {"spec": {"suspend": False, "workers": {"template": template}}}
        )

        async def steps() -> bool:
            return await trial.step() > saved

        await trial.until(f"a step after {saved}", steps, limit=120)
    first = await scene.board.current_pod(NAME, 0)
    assert first is not None
    env = await scene.kubectl("get", "pod", first.name, "-o", "jsonpath={.spec.containers[0].env}")
    assert "TINY_SECONDS" in env
    assert await trial.steps_lost() == 0
    scene.recorder.outcome.steps_lost = 0
    await scene.check_samples(trial)
    await scene.board.delete(NAME)

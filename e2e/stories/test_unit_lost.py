"""A rank of a job with two units dies, and its unit is lost with it. The other unit trains on, and
the lost unit comes back complete.
"""

import pytest

from everstep_demo.board import Pod
from everstep_stories.jobs import SCRIPTS_PATH
from everstep_stories.ranks import find_rank
from everstep_stories.scene import Scene

pytestmark = pytest.mark.timeout(400)
NAME, SLOT = "halves", 3


async def test_the_whole_unit_goes_on_and_the_other_joins_again(scene: Scene) -> None:
    job = scene.build_job(NAME, replicas=4, spec={"parallelism": {"shard": 2}})
    container = job["spec"]["workers"]["template"]["spec"]["containers"][0]
    container["command"] = ["everstep", "run", f"{SCRIPTS_PATH}/halves.py"]
    trial = await scene.start(job)
    await trial.until_stepping(limit=240)
    before = await scene.board.current_pod(NAME, SLOT)
    assert before is not None
    pid = await find_rank(scene, before)

    async def kill(pod: Pod) -> None:
        await scene.kubectl("exec", pod.name, "--", "sh", "-c", f"kill -KILL {pid}")

    await scene.play(
        trial, f"SIGKILL of the rank in {before.name}", kill, slot=SLOT, pod_stays=True
    )
    assert scene.recorder.outcome.steps_lost == 0
    incident = (await trial.incidents())[-1]
    assert (incident["cause"], incident["slot"]) == ("WorkerDied", SLOT), incident
    assert incident["rung"] == "regroup", incident
    assert await scene.board.quarantines() == []
    recovered = await trial.step()

    async def saved() -> bool:
        await trial.watch.refresh()
        return trial.watch.committed > recovered

    await trial.until("a checkpoint after the recovery", saved, limit=60)
    await scene.check_samples(trial)
    await scene.board.delete(NAME)

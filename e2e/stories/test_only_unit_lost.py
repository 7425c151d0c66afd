"""A job is one unit on two nodes, and one of the nodes loses power. No complete copy of the model
is left, and the store has no checkpoint. The job goes back to the near save in its pods' memory;
the lost pod's part of it comes from its copy on the other node.
"""

import pytest

from everstep_demo.board import Pod
from everstep_stories import power
from everstep_stories.jobs import SCRIPTS_PATH
from everstep_stories.scene import Scene

pytestmark = pytest.mark.timeout(400)
REDO_SECONDS = 6
STEPS = 13 * REDO_SECONDS
"""More steps than the job takes in that time: a step sleeps for 80 ms."""


async def test_the_job_goes_back_to_the_step_that_its_pods_kept(scene: Scene) -> None:
    job = power.build_job(scene, "divided", replicas=2)
    spec = job["spec"]
    spec["parallelism"] = {"shard": 2}
    spec["workers"]["minReplicas"] = 2
    spec["checkpoint"] = {"uri": spec["checkpoint"]["uri"], "everySeconds": 3600}
    spec["recovery"] = {"nodeLostSeconds": 5, "maxRedoSeconds": REDO_SECONDS}
    container = spec["workers"]["template"]["spec"]["containers"][0]
    container["command"] = ["everstep", "run", f"{SCRIPTS_PATH}/halves.py"]
    trial = await power.start(scene, job)

    async def find_kept() -> int:
        return int((await trial.job())["status"].get("keptStep") or 0)

    await trial.until("a step is kept", find_kept, limit=60)
    assert not (await trial.job())["status"].get("checkpoint"), "the store has nothing yet"
    kept = await find_kept()
    lost = await power.find_pod(scene, trial, 1)

    async def cut_power(pod: Pod) -> None:
        await scene.break_node(pod.node, kill_node=True)

    await scene.play(trial, f"{lost.node} (slot 1) without power", cut_power, slot=1)
    account = await scene.check_samples(trial)
    assert account.steps >= kept, "it was sent to the store once it was needed"
    assert scene.recorder.outcome.steps_lost <= STEPS
    await scene.board.delete(trial.name)

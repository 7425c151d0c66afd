"""An image cannot be pulled: a condition has the kubelet's message. With the right image the job
trains.
"""

import pytest

from everstep_stories.jobs import IMAGE
from everstep_stories.scene import Scene

pytestmark = pytest.mark.timeout(300)
NAME, WRONG = "misspelt", "everstep/no-such-trainer:1"


async def test_the_condition_has_the_kubelets_message_and_the_right_image_trains(
    scene: Scene,
) -> None:
    trial = await scene.start(scene.build_job(NAME, replicas=1, image=WRONG))

    async def reported() -> bool:
        conditions = (await trial.job()).get("status", {}).get("conditions", [])
        return any(WRONG in c["message"] for c in conditions)

    with scene.timed("applied → condition set"):
        await trial.until("the image's name in a condition", reported, limit=60)
    running = next(c for c in (await trial.job())["status"]["conditions"] if c["type"] == "Running")
    assert running["reason"] in ("ErrImagePull", "ImagePullBackOff"), running
    scene.recorder.say("condition", f"{running['reason']}: {running['message'][:160]}")
    job = await trial.job()
    template = job["spec"]["workers"]["template"]
    template["spec"]["containers"][0]["image"] = IMAGE
    with scene.timed("corrected → first step"):
        await scene.board.patch(
            NAME, {"spec": {"suspend": True, "workers": {"template": template}}}
        )
        await trial.until_condition("Suspended", limit=60)
        await scene.board.patch(NAME, {"spec": {"suspend": False}})
        await trial.until_stepping(limit=120)
    await scene.board.delete(NAME)

"""examples/llama with fewer steps: a rank is killed, and the job trains to its end."""

import pytest

from everstep_demo.board import Pod
from everstep_stories.jobs import read_llama
from everstep_stories.ranks import find_rank
from everstep_stories.scene import Scene

pytestmark = pytest.mark.timeout(900)
NAME, SLOT, STEPS = "llama", 3, 60
SAMPLES, BATCH = 65_535, 16
"""Windows of 64 bytes in 4 MiB of text; windows in a step."""


async def test_the_llama_loses_a_unit_gets_it_back_and_trains_to_its_end(scene: Scene) -> None:
    with scene.timed("applied → first step"):
        trial = await scene.start(read_llama(STEPS))
        await trial.until_stepping(limit=240)
    members = await trial.members()
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
    assert (incident["cause"], incident["rung"]) == ("WorkerDied", "regroup"), incident
    now = await trial.members()
    assert {s for s in now if now[s] != members[s]} == {2, 3}, "its unit is new, the other is not"

    await trial.until_condition("Complete", limit=500)
    assert await trial.steps_lost() == 0
    account = await scene.check_samples(trial, dataset=SAMPLES, batch=BATCH)
    assert account.steps == STEPS
    said = await scene.verify(trial)
    assert f"steps 1 to {STEPS} once each, {STEPS * BATCH} samples" in said
    losses = [entry.loss for entry in await trial.watch.ledger()]
    scene.recorder.say("loss", f"{losses[0]:.2f} → {losses[-1]:.2f}")
    assert losses[-1] < 0.6 * losses[0]
    await scene.board.delete(NAME)

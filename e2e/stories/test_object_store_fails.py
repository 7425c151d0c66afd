"""The object store does not answer, or rejects the credentials: steps continue, a condition names
the reason, and saves continue by themselves afterwards.
"""

import pytest

from everstep_demo.trial import Trial
from everstep_stories.jobs import URI
from everstep_stories.scene import Scene
from everstep_stories.without_store import check_recovery, until_reported

pytestmark = pytest.mark.timeout(400)


@pytest.mark.parametrize(
    ("fault", "reason", "words"),
    [
        pytest.param("hang", "Unreachable", URI, id="hangs"),
        pytest.param("refuse", "AccessDenied", "correct the Secret", id="refuses"),
    ],
)
async def test_steps_continue_and_saves_go_on_afterwards(
    scene: Scene, survivor: Trial, fault: str, reason: str, words: str
) -> None:
    epoch = await survivor.until_stepping()
    scene.recorder.say("store", await scene.break_store(fault))
    with scene.timed(f"{fault} → condition"):
        health = await until_reported(survivor, limit=120, reason=reason)
    scene.recorder.say("condition", f"{health['reason']}: {health['message']}")
    assert words in health["message"], health
    await scene.until_further(survivor, 40)
    await check_recovery(scene, survivor, epoch)

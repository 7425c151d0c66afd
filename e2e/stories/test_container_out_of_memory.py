"""A container exceeds its memory limit, and the kernel kills it. The other one trains on. The
container restarts in its pod, adopts the saves that it kept in memory, and joins the job again.
"""

import pytest

from everstep_stories import hungry
from everstep_stories.scene import Scene

pytestmark = pytest.mark.timeout(300)
NAME, SLOTS = "hungry", (1,)


async def test_it_comes_back_with_what_it_held(scene: Scene) -> None:
    trial, lines = await hungry.run(scene, NAME, SLOTS)
    await hungry.check(scene, trial, lines, SLOTS)
    claim = trial.watch.newest_claim
    assert claim is not None
    assert len(claim.members) == 2, "it has joined again"
    await scene.board.delete(NAME)

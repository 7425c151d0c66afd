"""A container takes more memory than its limit, and the kernel ends it. The others train on; it starts again in its
pod, adopts the saves that it held in memory, and joins them.
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

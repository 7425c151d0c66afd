"""All containers of a job exceed their memory limit in the same step. They restart in their pods,
and the job continues from the step before, whose save they kept in memory.
"""

import pytest

from everstep_stories import hungry
from everstep_stories.scene import Scene

pytestmark = pytest.mark.timeout(300)
NAME, SLOTS = "hungry-all", (0, 1)


async def test_they_come_back_with_what_they_held(scene: Scene) -> None:
    trial, lines = await hungry.run(scene, NAME, SLOTS)
    await hungry.check(scene, trial, lines, SLOTS)
    for slot in SLOTS:
        (fetched,) = [fields for event, fields in lines[slot] if event == "fetched"]
        assert fetched["step"] == str(hungry.SAVED)
        assert int(fetched["memory"]) > 0
    await scene.board.delete(NAME)

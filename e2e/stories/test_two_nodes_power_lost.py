"""Two of four nodes lose power at once. The other two are no majority: they keep their step until
the run log allows them to continue, and then train on as two. The lost pods are replaced on the
nodes that are left.
"""

import pytest

from everstep_demo.board import Pod
from everstep_stories import power
from everstep_stories.scene import Scene

pytestmark = pytest.mark.timeout(600)
NAME, SIZE = "quarters", 4


async def test_the_other_half_goes_on_and_is_whole_again(scene: Scene) -> None:
    trial = await power.start(scene, power.build_job(scene, NAME, replicas=SIZE))
    lost = choose_two(scene, [await power.find_pod(scene, trial, slot) for slot in range(SIZE)])
    async with power.hearing(trial) as said:
        await power.lose(scene, trial, lost)
    assert "recovery.replaceAfterSeconds" in power.told_of_silence(said), said
    await scene.board.delete(NAME)


def choose_two(scene: Scene, pods: list[Pod]) -> list[Pod]:
    """Choose two pods whose nodes lose power: the lowest slot, because with it the others could
    continue at once, and one whose node does not run the operator, so that a replica of it is left.
    """
    homes = {p["spec"].get("nodeName") for p in scene.system.pods()} if scene.system.by_helm else ()
    lowest, *others = pods
    return [lowest, min(others, key=lambda pod: pod.node in homes)]

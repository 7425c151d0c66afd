"""The leader gets SIGTERM (as in a roll-out or a node drain) in the middle of a recovery."""

from pathlib import Path

import pytest

from crash.lane import Lane
from crash.rig import a_rig
from crash.scenarios import XID_OFF_THE_BUS
from everstep_lab import Lab
from stub_image.given import build_stub_job

pytestmark = [pytest.mark.lab, pytest.mark.long, pytest.mark.timeout(600)]


async def test_the_standby_finishes_the_recovery_that_the_leader_began(
    lab: Lab, account: Path, tmp_path: Path
) -> None:
    async with a_rig(lab, tmp_path, account, standby=True) as rig:
        lane, operator = rig.lanes[0], rig.operator
        await lane.create(build_stub_job("handed"))
        await lane.until_running()
        leader = operator.leaders[-1]
        node = await lane.break_gpu(1, XID_OFF_THE_BUS)
        await lane.until_condition("Recovering")
        await operator.end(int(leader.removeprefix("replica-")))
        assert (await lane.status())["state"] == "Recovering"
        await lane.until_marked(node)
        await lane.until_running(slot_1=2)
        assert operator.leaders[-1] != leader
        assert operator.ends == 0, operator.said()
        await assert_counted_once(lane)
        await lane.release(node)
        await lane.end()


async def assert_counted_once(lane: Lane) -> None:
    shape = await lane.shape()
    assert [slot[:2] for slot in shape.slots] == [(0, 1), (1, 2)]
    assert shape.restarts == (("NodeGone", 1),)
    assert not any(is_open for *_, is_open in shape.incidents)

"""A regroup is driven by news alone: no agent waits until another one repeats its report."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.test_units_in_place import units
from everstep_agent.coordinator import term
from everstep_agent.pace import Pace
from everstep_contract.units import ONE_RANK

HEARTBEAT_SECONDS = 60.0
LIMIT_SECONDS = 40.0


@pytest.fixture
def no_heartbeats(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patched:
        patched.setattr(Pace, "period_seconds", HEARTBEAT_SECONDS)
        patched.setattr(term, "TICK_SECONDS", HEARTBEAT_SECONDS)
        yield


@pytest.mark.usefixtures("no_heartbeats")
@pytest.mark.parametrize("lost", [0, 1], ids=["beside the coordinator", "elsewhere"])
async def test_a_regroup_waits_for_no_heartbeat(tmp_path: Path, lost: int) -> None:
    async with units(tmp_path, 3, ONE_RANK) as gang:
        await gang.until(lambda s: s.running)
        os.kill(gang.worker(lost), signal.SIGKILL)
        await gang.until(lambda s: s.incidents and not s.incidents[-1].open, seconds=LIMIT_SECONDS)
        assert gang.seen.incidents[-1].rung == "regroup"

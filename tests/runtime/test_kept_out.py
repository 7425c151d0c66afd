"""Survivors have joined another coordinator's epoch by the time that they are claimed. Real ranks under real
agents. No rank's state may be lost.
"""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from agent.gang import Gang, assert_exact
from everstep import run
from everstep_agent.coordinator import regroup
from everstep_agent.pod import spawn
from runtime.test_regroup_agents import STEPS, a_script


@pytest.mark.parametrize(
    "late",
    [pytest.param((1, 2), marks=pytest.mark.long), (2,)],
    ids=["all survivors", "one of them"],
)
async def test_survivors_that_cannot_enter_the_claimed_epoch_are_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: tuple[int, ...]
) -> None:
    """As if a rival coordinator had let them join its epoch just before theirs was published."""
    monkeypatch.setattr(spawn, "SubprocessSpawner", lambda _: spawn.ForkSpawner(_run))
    publish, joined = regroup.begin, []

    async with Gang(tmp_path, 3, in_place=1, hang_seconds=60.0) as gang:

        def begin(term: Any, epoch: Any, cause: str) -> None:
            for slot in late if epoch.number == 2 else ():
                pod = gang.agents[slot].pod
                pod.joined, pod.joined_token = epoch.number + 1, "of a rival"
                joined.append(slot)
            publish(term, epoch, cause)

        monkeypatch.setattr(regroup, "begin", begin)
        await gang.until(lambda s: s.step >= 5)
        os.kill(gang.worker(0), signal.SIGKILL)
        await gang.reports()
        assert tuple(joined) == late
        incidents = {i.id: i for s in gang.history for i in s.incidents}
        claims = (await gang.run_log()).claims
        assert claims[1].epoch == 2
        assert max((link.last_step for link in claims[2].chain), default=0) >= 5, (
            "they restarted from step 0"
        )
        assert sum(i.steps_lost for i in incidents.values()) == 0
        assert "event=epoch_adopted" in gang.shown()
        assert gang.seen.done
        await assert_exact(gang, STEPS)


def _run() -> None:
    run(a_script, seed=2)

"""Random faults, two at a time, on real agents: the run ends, exact, and nothing that lived is lost."""

import os
from pathlib import Path

import pytest

from agent.storm import Storm
from everstep_contract import report

pytestmark = pytest.mark.timeout(600)
SEEDS = [int(s) for s in os.environ.get("EVERSTEP_STORM_SEEDS", "11").split(",")]
"""More of them, such as `EVERSTEP_STORM_SEEDS=1,2,3`, for a long run."""


@pytest.mark.parametrize("seed", SEEDS)
async def test_a_job_outlives_a_storm_and_its_ledger_is_exact(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everstep_agent.training.FENCE_SECONDS", 0.5)
    storm = Storm(tmp_path, seed)
    ends = await storm.play()
    assert {r.cause for r in ends.values()} == {report.Cause.DONE}, storm.story()
    found = await storm.gang.verified()
    assert found.ok, (found.problems, storm.story())
    assert [e.step for e in found.entries] == list(range(1, 251))
    claims = (await storm.gang.run_log()).claims
    assert storm.lost(claims) == [], storm.story()

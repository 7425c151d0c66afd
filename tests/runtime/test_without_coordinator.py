"""Real ranks keep stepping without a coordinator."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from agent.gang import Gang, assert_exact
from everstep import run
from everstep_agent.coordinator import boundary_turn
from everstep_agent.coordinator.term import Term
from everstep_agent.coordinator.watch import Watch
from everstep_agent.peers.agent_report import WorkerReport
from everstep_agent.pod import spawn
from everstep_contract import report
from runtime import a_paced_script


async def test_a_fault_of_the_coordinator_ends_no_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everstep_agent.coordinator.faults.REST_SECONDS", (0.5, 0.5, 0.5))
    forked = spawn.ForkSpawner(lambda: run(a_paced_script.main, seed=2))
    monkeypatch.setattr(spawn, "SubprocessSpawner", lambda _: forked)
    settle, raised = boundary_turn.settle, list[float]()

    def fault(term: Term, watch: Watch, workers: Sequence[WorkerReport], now: float) -> bool:
        if not raised and workers and min(w.applied for w in workers) >= 3:
            raised.append(now)
            raise KeyError("as told")
        return settle(term, watch, workers, now)

    monkeypatch.setattr(boundary_turn, "settle", fault)
    async with Gang(tmp_path, 2, hang_seconds=20.0) as gang:
        ends = await gang.reports()
        assert {r.cause for r in ends.values()} == {report.Cause.DONE}
        assert raised
        assert [c.epoch for c in (await gang.run_log()).claims] == [1]
        await assert_exact(gang, a_paced_script.STEPS)

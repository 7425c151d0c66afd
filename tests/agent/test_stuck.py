"""A process that SIGKILL does not end costs the job its pod, but does not end the job."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent.gang import Gang, assert_exact
from everstep_agent.pod import worker_processes
from everstep_contract import levels, report

KILLED_FOR = 0.5


@pytest.fixture
async def gang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Gang]:
    """Three slots. Slot 1's worker hangs at step 6; SIGKILL does not end it while `flag` exists."""
    monkeypatch.setattr(worker_processes, "KILL_SECONDS", KILLED_FOR)
    flag = tmp_path / "flag"
    gang = Gang(tmp_path, 3, hang_seconds=1.0)
    gang.stub["STUB_MODE"] = f"stuck:6:{flag}"
    try:
        async with gang, asyncio.timeout(150):
            yield gang
    finally:
        flag.unlink(missing_ok=True)


async def get_stuck(gang: Gang) -> int:
    """Wait until the worker hangs and SIGKILL cannot end it; return its pid."""
    await gang.until(lambda s: s.step >= 5)
    pid = gang.worker(1)
    await gang.until(lambda _: (gang.tmp / "flag").exists())
    if (said := (gang.tmp / "flag").read_text()) != "seized":
        pytest.skip(f"this kernel does not let a process be traced: {said}")
    return pid


def runs(pid: int) -> bool:
    """Return whether the process still runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def test_the_others_save_and_go_on_once_the_operator_has_replaced_the_pod(gang: Gang) -> None:
    pid = await get_stuck(gang)
    seen = await gang.until(lambda s: s.stuck, seconds=30)
    assert [(s.slot, s.attempt) for s in seen.stuck] == [(1, 0)]
    assert f"pid {pid}" in seen.stuck[0].message
    seen = await gang.until(lambda s: s.incidents and s.incidents[-1].step >= 5, seconds=30)
    assert (seen.incidents[-1].slot, seen.incidents[-1].steps_lost) == (1, 0)
    assert runs(pid)

    early = report.decode((gang.tmp / "report-uid-1-1-0").read_bytes())
    assert early is not None
    assert early.cause is report.Cause.PROCESS_STUCK, "the agent writes it before it ends"
    assert not gang.tasks[1].done()
    assert len((await gang.run_log()).claims) == 1, "a process that is not proven dead was left out"

    gang.stub["STUB_MODE"] = ""
    gang.agents[3], stuck = gang.agents[1], gang.tasks.pop(1)
    gang.tasks[3] = stuck
    gang.want(gone=(levels.SlotAttempt(slot=1, attempt=0),))
    await gang.start(1, 1)
    await gang.until(lambda s: s.epoch == 2 and s.running, seconds=60)
    found = await asyncio.wait_for(stuck, 30)
    assert (found.cause, found.exit_code()) == (report.Cause.PROCESS_STUCK, report.EXIT_FOR_GOOD)
    assert runs(pid), "the agent must end although the process still runs"
    del gang.tasks[3]
    ends = await gang.reports()
    assert {r.cause for r in ends.values()} == {report.Cause.DONE}
    assert gang.seen.restarts == {"ProcessStuck": 1}
    await assert_exact(gang, 20)


async def test_an_agent_that_nobody_replaces_ends_by_itself(
    gang: Gang, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everstep_agent.agent.STUCK_SECONDS", 0.5)
    pid = await get_stuck(gang)
    found = await asyncio.wait_for(gang.tasks.pop(1), 30)
    assert found.cause is report.Cause.PROCESS_STUCK
    assert runs(pid)


async def test_an_agent_that_is_told_to_end_does_not_wait_for_it(gang: Gang) -> None:
    pid = await get_stuck(gang)
    os.kill(pid, 0)
    gang.agents[1].leave()
    gang.want(stop=levels.Stop.SUSPEND)
    ends = await gang.reports(60)
    assert {ends[s].cause for s in (0, 2)} == {report.Cause.STOPPED}
    assert runs(pid)

"""A rank that waits for others as long as a hang shows where it waits, and is not ended."""

import re
import time
from pathlib import Path

import pytest

from agent.gang import Gang, assert_exact
from everstep import Job, run
from everstep_agent.pod import spawn
from runtime import a_paced_script

STEPS = 6
LONG_WAIT = re.compile(r"waits for other ranks: \d+ s in step 4; its stacks follow")
"""How many seconds depends on when the agent looked last."""


def a_script(job: Job, may_go: Path) -> None:
    def pause(step: int) -> None:
        if job.rank == 1 and step == 3:
            with job.pause("a slow export", limit=60):
                while not may_go.exists():
                    time.sleep(0.01)
        if job.rank == 0 and step == 4:
            time.sleep(1.0)  # long enough to be looked at, after a wait that was over its limit

    a_paced_script.main(job, STEPS, pause)


async def test_a_long_wait_shows_its_stack_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    may_go = tmp_path / "may-go"
    forked = spawn.ForkSpawner(lambda: run(lambda job: a_script(job, may_go), seed=2))
    monkeypatch.setattr(spawn, "SubprocessSpawner", lambda _: forked)
    async with Gang(tmp_path, 2, hang_seconds=4.0) as gang:
        await gang.until(lambda _: LONG_WAIT.search(gang.shown()) is not None, seconds=60)
        may_go.touch()
        await gang.reports()
        assert [c.epoch for c in (await gang.run_log()).claims] == [1]
        await assert_exact(gang, STEPS)
    assert len(LONG_WAIT.findall(gang.shown())) == 1, "each step may show it once only"
    shown = capfd.readouterr().err
    assert "[1/0]   File" in shown
    assert "in _read_all" in shown, "the stack must show the wait for the others' vectors"

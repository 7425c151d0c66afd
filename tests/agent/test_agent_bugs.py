"""An exception in the agent's own code ends the agent with its traceback. Nothing waits for what it has broken."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from agent.gang import Gang
from everstep_contract import report


def fail(*given: Any, **more: Any) -> None:
    raise KeyError("as told")


def assert_bug(end: report.ExitReport) -> None:
    assert (end.cause, end.exit_code()) == (report.Cause.AGENT, report.EXIT_TRY_AGAIN)
    assert "the agent failed: KeyError: 'as told'" in end.message
    assert "in fail" in end.traceback


@pytest.mark.parametrize("where", ["a worker's death", "a worker's frame"])
async def test_a_bug_in_what_follows_a_workers_word_or_death_ends_its_agent(
    tmp_path: Path, where: str
) -> None:
    gang = Gang(tmp_path, 2)
    gang.stub["STUB_UNTIL"] = "100000"
    async with gang:
        await gang.until(lambda s: s.step >= 2)
        pod = gang.agents[1].pod
        if where == "a worker's death":
            pod.deaths.died = fail  # type: ignore[method-assign]
            os.kill(gang.worker(1), signal.SIGKILL)
        else:
            pod.frames._applied = fail  # type: ignore[method-assign]
        assert_bug(await asyncio.wait_for(gang.tasks[1], 30))


async def test_a_bug_at_an_epochs_start_ends_the_agent(tmp_path: Path) -> None:
    """The other members would wait for this one for six times `startupSeconds`."""
    async with Gang(tmp_path, 2) as gang:
        gang.agents[1].pod._start = fail  # type: ignore[method-assign]
        assert_bug(await asyncio.wait_for(gang.tasks[1], 30))

"""`everstep run` shows which process holds a rank, also that of a worker that joined in place."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from agent.test_launcher import Run
from runtime import a_paced_script


async def test_a_worker_that_joins_is_shown_with_the_rank_that_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACED_STEPS", "1000000")
    run = Run(tmp_path, script=a_paced_script.__file__)
    running = asyncio.create_task(run.launcher.run())
    pid = int((await run.line(r"rank 1 runs as pid (\d+)"))[1])
    async with asyncio.timeout(60):
        while run.launcher.seen.step < 5:  # noqa: ASYNC110 told twice a second
            await asyncio.sleep(0.05)
    before = len(run.said)
    os.kill(pid, signal.SIGKILL)
    await run.line("continues without a restart", before)
    assert (await run.line(r"rank (\d) runs as pid", before))[1] == "1"
    os.kill(os.getpid(), signal.SIGINT)
    assert await running == 130

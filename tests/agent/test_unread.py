"""Output that nobody reads: no step waits for it, and dropped lines are counted and reported."""

import asyncio
import os
import re
import sys
from pathlib import Path

import pytest

from agent.containers import Containers
from agent.gang import STUB
from everstep_agent import storage
from everstep_agent.runlog.run_log import RunLog
from everstep_contract import log, report

pytestmark = pytest.mark.timeout(180)
CHATTER = {"STUB_SAY_LINES": "2000", "STUB_UNTIL": "20"}
"""200 kB on each stream in each of 20 steps, which is more than pipes and queues hold."""


async def until_done(uri: str, run: str) -> None:
    """Wait for `Done` in the run log, so that the test need not read any output."""
    async with asyncio.timeout(90):
        found = RunLog(storage.open_store(uri, run, {}))
        while not any(isinstance(e, log.Done) for e in found.entries):
            await found.refresh()
            await asyncio.sleep(0.1)


async def test_a_log_driver_that_is_stuck_stops_no_agent(tmp_path: Path) -> None:
    """Each container writes stdout and stderr to a pipe that nobody reads."""
    async with Containers(tmp_path, 2, CHATTER) as gang:
        held = []
        for container in gang.all:
            os.mkfifo(container.output)
            held.append(os.open(container.output, os.O_RDWR))
        try:
            await gang.until_all_ended()
        finally:
            for descriptor in held:
                os.close(descriptor)
        assert [c.codes for c in gang.all] == [[0], [0]]
        ends = [c.report() for c in gang.all]
        assert [r and r.cause for r in ends] == [report.Cause.DONE] * 2
        notes = [n for n in gang.seen.notes if "nobody reads" in n]
        assert {n.split(":")[0] for n in notes} == {"slot 0", "slot 1"}
        assert gang.seen.incidents == ()


async def test_a_terminal_that_is_stopped_stops_no_run(tmp_path: Path) -> None:
    """As with Ctrl-S or `| less`. The output, read later, says how many lines are missing."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "everstep_agent.cli", "run", "--workers", "2", STUB,
        cwd=tmp_path,
        env={**os.environ, **CHATTER},
        stdout=(pipe := os.pipe())[1],
        stderr=pipe[1],
    )  # fmt: skip
    os.close(pipe[1])
    try:
        await until_done(f"file://{tmp_path}/everstep-store", "stub_worker")
        text = await asyncio.to_thread(Path(f"/dev/fd/{pipe[0]}").read_text)
        async with asyncio.timeout(30):
            assert await process.wait() == 0
    finally:
        os.close(pipe[0])
        if process.returncode is None:
            process.kill()
            await process.wait()
    dropped = re.findall(r"dropped ([\d,]+) lines: nobody read", text)
    assert dropped
    # A lower bound: an agent reports its own gaps in lines that the launcher may drop.
    assert sum(int(d.replace(",", "")) for d in dropped) > 2000
    assert "done: trained to step 20" in text

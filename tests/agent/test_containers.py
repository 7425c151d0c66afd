"""Real agent processes are killed: no process that they started survives, and the run continues."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agent.containers import Containers
from agent.gang import STUB
from everstep_agent import storage
from everstep_agent.tools import verify
from everstep_contract import env, report

pytestmark = pytest.mark.timeout(300)
SIGKILLED = -signal.SIGKILL
"""The status in Python; a shell and Kubernetes report it as 137."""


def is_over(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


async def until_over(pids: list[int]) -> None:
    async with asyncio.timeout(30):
        while not all(is_over(p) for p in pids):  # noqa: ASYNC110 a process's end sets no event
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("victims", "whole"),
    [
        pytest.param((1,), False, id="an agent alone", marks=pytest.mark.long),
        pytest.param((1,), True, id="a container"),
        pytest.param((0, 1), True, id="every container", marks=pytest.mark.long),
    ],
)
async def test_what_is_killed_ends_with_all_it_started_and_goes_on_in_its_next_life(
    tmp_path: Path, victims: tuple[int, ...], whole: bool
) -> None:
    async with Containers(tmp_path, 2, save_every_steps=10) as gang:
        await gang.until_step(15)
        chosen = [gang.all[v] for v in victims]
        workers = [pid for c in chosen for pid in c.children()]
        assert workers
        for container in chosen:
            container.kill_all() if whole else os.kill(container.pid, signal.SIGKILL)
        await until_over(workers)
        await gang.until_all_ended()
        for container in gang.all:
            hurt = container in chosen
            assert container.codes == ([SIGKILLED, 0] if hurt else [0])
            found = container.report()
            assert found is not None
            assert (found.cause, found.done) == (report.Cause.DONE, True)
            assert found.incarnation == (2 if hurt else 1), "the memory folder counts it"
            assert container.children() == []
            assert ("adopted=" in container.output.read_text()) == hurt
        lost = sum(i.steps_lost for i in gang.seen.incidents)
        assert lost == 0 if len(victims) == 1 else lost < 50
        run = await verify.verify_run(storage.open_store(gang.store, "ns/job", {}), entries=True)
        assert run.ok, run.problems
        assert [e.step for e in run.entries] == list(range(1, 61))


async def test_a_pod_whose_memory_is_lost_takes_part_again(tmp_path: Path) -> None:
    """Its node reboots: the container starts again in an empty folder, and the kubelet still counts its starts."""
    async with Containers(tmp_path, 2, {"STUB_UNTIL": "20"}) as gang:
        await gang.until_step(5)
        rebooted = gang.all[1]
        rebooted.memory = tmp_path / "empty"
        rebooted.kill_all()
        await gang.until_all_ended()
        assert rebooted.codes == [SIGKILLED, report.EXIT_TRY_AGAIN, 0]
        found = rebooted.report()
        assert found is not None
        assert (found.cause, found.incarnation) == (report.Cause.DONE, 3)
        assert "number 1 has ended: the pod's memory was lost" in rebooted.output.read_text()


async def test_a_second_agent_that_is_started_by_hand_changes_nothing(tmp_path: Path) -> None:
    """With `kubectl exec POD -- everstep run train.py`, which has the container's environment."""
    async with Containers(tmp_path, 1, {"STUB_UNTIL": "1000"}) as gang:
        await gang.until_step(5)
        (container,) = gang.all
        second = container.run_command(subprocess.PIPE)
        _, said = await asyncio.to_thread(second.communicate)
        assert second.returncode == 2
        assert b"this container's agent runs already" in said
        assert (container.memory / "incarnation").read_text().strip() == "1"
        assert container.termination.read_bytes() == b""
        assert list(container.memory.glob("position-*"))


TOLD_AT_ONCE = """
import os, signal
from everstep_agent import agent, cli

build = agent.build_spawner

def build_late(*given):
    os.kill(os.getpid(), signal.SIGTERM)
    return build(*given)

agent.build_spawner = build_late
cli.main()
"""


async def test_a_pod_that_is_deleted_while_its_agent_starts_leaves_at_once(tmp_path: Path) -> None:
    settings = env.AgentEnv(
        job="ns/job", job_uid="uid-1", slot=0, attempt=0, token="t", pod_ip="127.0.0.1", port=0,
        uri=f"file://{tmp_path}/store", run="ns/job", memory=str(tmp_path / "memory"),
        termination_log=str(tmp_path / "termination"),
    )  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", TOLD_AT_ONCE, "run", STUB,
        env={**os.environ, **settings.to_env()}, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
    found = report.decode((tmp_path / "termination").read_bytes())
    assert found is not None
    assert found.cause is report.Cause.LEFT

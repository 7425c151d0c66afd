"""Ranks that stop making progress, with real agents and forked workers with torch."""

import asyncio
import ctypes
import os
import re
import signal
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent.gang import Gang, assert_exact, stop_while_it_computes, stopped
from everstep import Job, run
from everstep_agent.pod import spawn
from everstep_agent.pod.worker import Worker
from runtime import a_paced_script

STEPS = 150
LEARNT = 70
"""Steps after which each rank has learned its limit."""
SO_ATTACH_FILTER = 26


@pytest.fixture
def trains(
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[Callable[[Job, int], None]], None]:
    """Let all workers train, and call the given function after each step."""

    def script(after: Callable[[Job, int], None]) -> None:
        def main(job: Job) -> None:
            def pause(step: int) -> None:
                time.sleep(0.02)
                after(job, step)

            a_paced_script.main(job, STEPS, pause)

        forked = spawn.ForkSpawner(lambda: run(main, seed=2))
        monkeypatch.setattr(spawn, "SubprocessSpawner", lambda _: forked)

    return script


def once(flag: Path, act: Callable[[], None]) -> Callable[[Job, int], None]:
    """Let rank 1 call `act` once, when it has learned its limit."""

    def after(job: Job, step: int) -> None:
        if job.rank == 1 and step == LEARNT and not flag.exists():
            flag.touch()
            act()

    return after


async def stop_while_it_waits(worker: Worker) -> None:
    while True:
        os.kill(worker.pid, signal.SIGSTOP)
        while not stopped(worker.pid):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        if worker.position().waiting:
            return
        os.kill(worker.pid, signal.SIGCONT)
        await asyncio.sleep(0.002)


async def assert_cut_out(gang: Gang, words: str) -> None:
    await gang.until(lambda s: any(not i.open for i in s.incidents), 60)
    (incident,) = gang.seen.incidents
    assert (incident.cause, incident.rung, incident.steps_lost) == ("NoProgress", "regroup", 0)
    assert incident.rank == 1
    assert words in incident.message
    assert re.search(r"bucket 1 of 1 in reduction 0 of step \d+|the vector in", incident.message)
    await gang.reports()
    await assert_exact(gang, STEPS)


@pytest.mark.parametrize("where", ["computing", pytest.param("waiting", marks=pytest.mark.long)])
async def test_a_stopped_rank_is_cut_out_and_the_others_go_on(
    tmp_path: Path, trains: Callable[..., None], where: str
) -> None:
    trains(lambda job, step: None)
    async with Gang(tmp_path, 3, in_place=1, hang_seconds=60.0) as gang:
        await gang.until(lambda s: s.step >= LEARNT)
        worker = gang.agents[1].pod.workers.current[0]
        await (stop_while_it_computes if where == "computing" else stop_while_it_waits)(worker)
        await gang.until(lambda s: s.epoch == 2 and s.running, 30)  # far below hang_seconds
        await assert_cut_out(gang, "stopped by a signal")


async def test_a_rank_whose_interpreter_is_held_by_a_call_into_c_is_cut_out_with_its_stack(
    tmp_path: Path, trains: Callable[..., None], capfd: pytest.CaptureFixture[str]
) -> None:
    def hold() -> None:
        ctypes.PyDLL(None).sleep(30)  # a PyDLL keeps the interpreter's lock

    trains(once(tmp_path / "flag", hold))
    async with Gang(tmp_path, 3, in_place=1, hang_seconds=60.0) as gang:
        await assert_cut_out(gang, "computing, while the others wait for it")
    assert "in hold" in capfd.readouterr().err


def lose_all_packets(job: Job) -> None:
    """Let the kernel drop everything that the others send this rank over the group's connections, including
    acknowledgements. Later connections work.
    """
    group: Any = job._session.membership.group
    drop_all = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 0))
    program = struct.pack("@HP", 1, ctypes.addressof(drop_all))
    for one in (*group._sockets, *group.mesh.sockets):
        one.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)


async def test_a_sum_in_which_nothing_moves_is_left_and_the_same_ranks_go_on(
    tmp_path: Path, trains: Callable[..., None]
) -> None:
    flag, lost_at = tmp_path / "flag", tmp_path / "lost"

    def after(job: Job, step: int) -> None:
        if job.rank == 1 and step == LEARNT and not flag.exists():
            flag.touch()
            lose_all_packets(job)
            lost_at.write_text(str(time.monotonic()))
        elif step == LEARNT + 1 and lost_at.exists() and job.rank == 0:
            print(f"next step {time.monotonic() - float(lost_at.read_text()):.2f} s after the loss")

    trains(after)
    async with Gang(tmp_path, 3, in_place=1, hang_seconds=60.0) as gang:
        await gang.until(lambda s: s.step >= LEARNT)
        before = [gang.worker(slot) for slot in range(3)]
        await gang.until(lambda s: any(not i.open for i in s.incidents), 30)
        (incident,) = gang.seen.incidents
        assert (incident.cause, incident.rung, incident.steps_lost) == ("GroupStuck", "regroup", 0)
        assert f"in reduction 0 of step {LEARNT + 1}, and nothing has moved" in incident.message
        assert [gang.worker(slot) for slot in range(3)] == before, "a rank restarted"
        await gang.reports()
        await assert_exact(gang, STEPS)


async def test_a_step_that_is_slow_on_all_ranks_or_announced_is_no_hang(
    tmp_path: Path, trains: Callable[..., None]
) -> None:
    def slow(job: Job, step: int) -> None:
        if step == LEARNT:
            time.sleep(1.5)
        if step == LEARNT + 20 and job.rank == 1:
            with job.pause("an export", limit=60):
                time.sleep(1.5)

    trains(slow)
    async with Gang(tmp_path, 2, in_place=1, hang_seconds=60.0) as gang:
        await gang.reports()
        assert gang.seen.incidents == ()
        assert "event=no_progress" not in gang.shown()
        await assert_exact(gang, STEPS)

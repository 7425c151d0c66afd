"""A worker that a signal has ended is proven dead while the kernel still frees its memory. Uses real processes."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent.gang import Gang
from agent.test_spawn import Fixture, until
from everstep_agent.peers.agent_report import State
from everstep_agent.pod import exiting, spawn
from everstep_agent.pod.worker import Worker
from everstep_agent.pod.workers import WorkerSet
from everstep_contract import wire
from everstep_contract.position import PositionPage

OWNS = """
import os, threading, time
from everstep_contract import env, position
page = position.PositionPage(os.environ[env.POSITION_FILE])
def own():
    page.own()
    open("{mark}", "w").close()
{how}
threading.Thread(target=time.sleep, args=(600,)).start()
time.sleep(600)
"""
IN_MAIN = "own()"
LINES = 4000
CRASHES = f"""
import signal, sys
def crash(*_):
    sys.stderr.write("".join(f"line {{number}}\\n" for number in range({LINES})))
    sys.stderr.flush()
    os.abort()
signal.signal(signal.SIGUSR1, crash)
own()
"""
IN_A_THREAD_THAT_ENDS = "t = threading.Thread(target=own); t.start(); t.join()"


@pytest.fixture
def child() -> Iterator[Callable[..., int]]:
    started: list[subprocess.Popen[bytes]] = []

    def start(script: str, **options: object) -> int:
        started.append(subprocess.Popen([sys.executable, "-c", script], **options))  # type: ignore[call-overload]
        return started[-1].pid

    yield start
    for process in started:
        process.kill()
        process.wait()


def wait_exited(pid: int) -> None:
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def test_only_a_process_that_a_signal_has_ended_counts(child) -> None:
    running, stopped = (child("import time; time.sleep(600)") for _ in range(2))
    done, failed = child(""), child("raise SystemExit(9)")
    os.kill(stopped, signal.SIGSTOP)
    os.waitid(os.P_PID, stopped, os.WSTOPPED | os.WNOWAIT)
    for pid in (done, failed):
        wait_exited(pid)
    assert [exiting.find_killer(pid) for pid in (running, stopped, done, failed)] == [0] * 4
    for pid, number in ((running, signal.SIGKILL), (stopped, signal.SIGKILL)):
        os.kill(pid, number)
        wait_exited(pid)
        assert exiting.find_killer(pid) == number


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGTERM])
def test_each_fatal_signal_counts(child, number: signal.Signals) -> None:
    pid = child("import time; print(flush=True); time.sleep(600)", stdout=subprocess.DEVNULL)
    os.kill(pid, number)
    wait_exited(pid)
    assert exiting.find_killer(pid) == number


def test_a_process_that_has_dumped_core_counts(monkeypatch) -> None:
    read = exiting.read_stat

    def stat(folder: str) -> list[str]:
        found = read(folder)
        return [*found[:6], str(int(found[6]) | 0x4), *found[7:49], str(0x80 | signal.SIGSEGV)]

    monkeypatch.setattr(exiting, "read_stat", stat)
    assert exiting.find_killer(os.getpid()) == signal.SIGSEGV


def test_a_process_that_was_reaped_does_not_count(child) -> None:
    pid = child("")
    os.waitpid(pid, 0)
    assert not exiting.find_killer(pid)


def test_each_thread_has_to_exit(monkeypatch) -> None:
    """All threads but one seem to exit, with the exit code of SIGKILL."""
    read = exiting.read_stat

    def stat(folder: str) -> list[str]:
        found = read(folder)
        exits = not folder.endswith(f"task/{threading.get_native_id()}")
        return [*found[:6], str(int(found[6]) | (0x4 if exits else 0)), *found[7:49], "9"]

    monkeypatch.setattr(exiting, "read_stat", stat)
    other = threading.Thread(target=threading.Event().wait, args=(5,), daemon=True)
    other.start()
    assert not exiting.find_killer(os.getpid())


class Slow(Fixture):
    """The kernel is slow to free a killed worker's memory."""

    def __init__(self, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(memory)
        self.freed = asyncio.Event()
        wait_ended = spawn.wait_ended

        async def wait(pid: int) -> None:
            await wait_ended(pid)
            await self.freed.wait()

        monkeypatch.setattr(spawn, "wait_ended", wait)

    def on_death(self, worker: Worker) -> None:
        self.tail_at_death = worker.tail.text()
        super().on_death(worker)

    async def begin(self, how: str) -> WorkerSet:
        mark = self.memory / "owned"
        workers = await self.open(OWNS.format(mark=mark, how=how))
        await until(mark.exists)
        workers.processes.heard(workers.fresh[0])
        return workers


@pytest.fixture
async def slow(tmp_path: Path, monkeypatch):
    fixture = Slow(tmp_path, monkeypatch)
    yield fixture
    fixture.freed.set()
    await fixture.workers.close()


async def test_a_killed_worker_is_dead_before_its_memory_is_free(slow: Slow) -> None:
    workers = await slow.begin(IN_MAIN)
    pid = workers.fresh[0].pid
    os.kill(pid, signal.SIGKILL)
    dead = await slow.death()
    assert dead.exit_text() == "killed by signal 9 (SIGKILL)"
    assert [e.life for e in workers.processes.ended_lives()] == [1]
    assert pid in workers.processes.pids, "the process is not reaped yet"
    assert not dead.ended.is_set()


async def test_the_last_lines_of_a_crash_are_read_before_its_death_is_told(slow: Slow) -> None:
    workers = await slow.begin(CRASHES)
    pid = workers.fresh[0].pid
    os.kill(pid, signal.SIGUSR1)
    dead = await slow.death()
    assert dead.exit_text() == "killed by signal 6 (SIGABRT)"
    assert slow.tail_at_death.splitlines()[-1] == f"line {LINES - 1}"
    assert pid in workers.processes.pids, "the process is not reaped yet"


async def test_the_next_worker_is_ready_once_the_memory_is_free(slow: Slow) -> None:
    workers = await slow.begin(IN_MAIN)
    os.kill(workers.fresh[0].pid, signal.SIGKILL)
    dead = await slow.death()
    workers.ensure_fresh()
    await until(lambda: 0 in workers.fresh)
    workers.fresh[0].state = State.READY
    assert workers.ready_lives() == ()
    slow.gone.clear()
    slow.freed.set()
    await asyncio.wait_for(slow.gone.wait(), 20)
    assert workers.ready_lives() == (2,)
    assert dead.ended.is_set()
    assert dead.pid not in workers.processes.pids


async def test_a_killed_worker_whose_memory_is_never_free_is_stuck(slow: Slow, monkeypatch) -> None:
    workers = await slow.begin(IN_MAIN)
    os.kill(workers.fresh[0].pid, signal.SIGKILL)
    dead = await slow.death()
    assert dead.killed_at is not None
    assert workers.processes.find_stuck(dead.killed_at + 29) == []
    assert workers.processes.find_stuck(dead.killed_at + 31) == [dead]


async def test_the_time_of_a_paused_machine_makes_no_killed_worker_stuck(slow: Slow) -> None:
    workers = await slow.begin(IN_MAIN)
    os.kill(workers.fresh[0].pid, signal.SIGKILL)
    dead = await slow.death()
    assert dead.killed_at is not None
    assert workers.processes.find_stuck(dead.killed_at + 1) == []
    assert workers.processes.find_stuck(dead.killed_at + 3600) == []
    looks = [
        workers.processes.find_stuck(dead.killed_at + 3600 + second) for second in range(1, 31)
    ]
    assert [found for found in looks if found] == [[dead]], "it does not end although all run again"
    assert "has not ended 31 s after SIGKILL" in dead.stuck


async def test_without_a_thread_a_killed_worker_is_dead_once_its_memory_is_free(
    slow: Slow, monkeypatch
) -> None:
    """The container may have no more processes."""

    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    workers = await slow.begin(IN_MAIN)
    worker = workers.fresh[0]
    os.kill(worker.pid, signal.SIGKILL)
    slow.freed.set()
    await asyncio.wait_for(worker.ended.wait(), 30)
    assert worker.state is State.DEAD


async def test_a_thread_that_ends_is_no_death(slow: Slow, monkeypatch) -> None:
    monkeypatch.setattr(exiting, "PROOF_SECONDS", 0.05)
    workers = await slow.begin(IN_A_THREAD_THAT_ENDS)
    worker = workers.fresh[0]
    watches = [t for t in threading.enumerate() if t.name == f"everstep-watch-{worker.pid}"]
    for watch in watches:
        await asyncio.to_thread(watch.join)
    assert worker.alive
    os.kill(worker.pid, signal.SIGKILL)
    slow.freed.set()
    assert (await slow.death()) is worker


async def test_a_page_that_nobody_owns_tells_nothing(tmp_path: Path, child) -> None:
    path = str(tmp_path / "page")
    PositionPage(path, create=True)
    told = threading.Event()
    pid = child("")
    exiting.watch_killed(path, pid, told.set)
    exiting.watch_killed(str(tmp_path / "none"), pid, told.set)
    for watch in [t for t in threading.enumerate() if t.name == f"everstep-watch-{pid}"]:
        await asyncio.to_thread(watch.join)
    await asyncio.sleep(0)
    assert not told.is_set()


async def test_a_frame_that_was_on_its_way_revives_nobody(tmp_path: Path) -> None:
    async with Gang(tmp_path, 1) as gang:
        await gang.until(lambda s: s.step >= 3)
        pod = gang.agents[0].pod
        worker = pod.workers.current[0]
        os.kill(worker.pid, signal.SIGKILL)
        await until(lambda: not worker.alive)
        pod.frames.take(worker, wire.Envelope(id=0, frame=wire.Finished(epoch=1, step=3)))
        assert not worker.alive

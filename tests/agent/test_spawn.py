"""Starts workers and proves their end. Uses real processes."""

import asyncio
import gc
import io
import os
import resource
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from everstep_agent import logline
from everstep_agent.peers.agent_report import State
from everstep_agent.pod import hang, spawn
from everstep_agent.pod.hang_watch import HangWatch
from everstep_agent.pod.worker import Worker
from everstep_agent.pod.worker_processes import Events, Place
from everstep_agent.pod.workers import WorkerSet
from everstep_contract import wire
from everstep_contract.position import Position, Where

LIMITS = hang.Limits(step=1.0, startup=5.0)
IDLE = "import time\nprint('up', flush=True)\ntime.sleep(600)\n"


class Fixture:
    def __init__(self, memory: Path) -> None:
        self.memory = memory
        self.dead: list[Worker] = []
        self.errors: list[BaseException] = []
        self.died = asyncio.Event()
        self.gone = asyncio.Event()
        self.said = io.StringIO()

    async def open(self, script: str, count: int = 1) -> WorkerSet:
        path = self.memory / "script.py"
        path.write_text(script)
        self.workers = WorkerSet(
            spawner=spawn.SubprocessSpawner(str(path)),
            place=Place(count=count, memory=str(self.memory), environ=dict(os.environ)),
            events=Events(
                on_frame=lambda worker, envelope: None,
                on_last_frame=lambda worker: None,
                on_death=self.on_death,
                on_gone=self.gone.set,
                on_error=self.errors.append,
            ),
            log=logline.Log(self.said),
        )
        await self.workers.processes.open()
        self.workers.ensure_fresh()
        await until(lambda: self.workers.processes.lives == [1] * count)
        return self.workers

    def on_death(self, worker: Worker) -> None:
        self.dead.append(worker)
        self.died.set()

    async def death(self) -> Worker:
        await asyncio.wait_for(self.died.wait(), 20)
        return self.dead[0]


@pytest.fixture
async def given(tmp_path: Path):
    fixture = Fixture(tmp_path)
    yield fixture
    await fixture.workers.close()


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):  # it may end while its file is open
        return True


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not true():  # noqa: ASYNC110 other processes set no event here
            await asyncio.sleep(0.01)


async def test_a_death_is_noticed_with_its_signal_and_counts_as_proof(given: Fixture):
    workers = await given.open(IDLE)
    os.kill(workers.fresh[0].pid, signal.SIGKILL)
    worker = await given.death()
    assert worker.state is State.DEAD
    assert worker.exit_text() == "killed by signal 9 (SIGKILL)"
    assert workers.processes.ended_lives()[0].life == 1


async def test_a_death_is_reported_before_the_memory_of_its_copies_is_free(
    given: Fixture, monkeypatch: pytest.MonkeyPatch
):
    workers = await given.open(IDLE)
    slot = given.memory / "staging" / f"slot-{workers.fresh[0].pid}-1"
    slot.parent.mkdir(exist_ok=True)
    slot.write_bytes(b"x")
    inode, close = slot.stat().st_ino, os.close
    reported, freed = threading.Event(), threading.Event()

    def free(descriptor: int) -> None:
        found = os.fstat(descriptor).st_ino == inode
        assert not found or reported.wait(20)  # on the agent's event loop it would wait in vain
        close(descriptor)
        if found:
            freed.set()

    monkeypatch.setattr(os, "close", free)
    os.kill(workers.fresh[0].pid, signal.SIGKILL)
    await given.death()
    assert not freed.is_set()
    reported.set()
    assert await asyncio.to_thread(freed.wait, 20)
    assert not slot.exists()


async def test_what_a_worker_staged_in_an_epoch_is_not_known_of_in_the_next(given: Fixture):
    workers = await given.open(IDLE)
    await until(lambda: 0 in workers.fresh)
    worker = workers.current[0] = workers.fresh.pop(0)
    worker.staged = worker.whole = 40
    order = wire.Regroup(
        epoch=2, rank=0, world=1, local_world=1, node_rank=0, applied=41, reductions=0
    )
    workers.continue_in([1], lambda _: order)
    assert (worker.epoch, worker.staged, worker.whole) == (2, 0, 0)


@pytest.mark.parametrize("dies", [0, 1])
async def test_a_newcomer_enters_the_epoch_that_names_it_even_if_a_rank_has_died_since(
    given: Fixture, dies: int
):
    """Else the pod would end its healthy ranks, because it could not follow the epoch."""
    workers = await given.open(IDLE, count=2)
    await until(lambda: len(workers.fresh) == 2)
    member, newcomer = workers.fresh.pop(0), workers.fresh[1]
    workers.current[0], newcomer.joins = member, 3
    assert workers.find_newcomers((1, 1)) == [newcomer]
    assert workers.find_newcomers((2, 1)) == [], "a rank of another process"
    assert workers.find_newcomers((1, 0)) == []
    os.kill((member, newcomer)[dies].pid, signal.SIGKILL)
    await given.death()
    assert workers.find_newcomers((1, 1)) == [newcomer]
    assert workers.enter((1, 1)) == [newcomer]
    assert workers.current == {0: member, 1: newcomer}
    assert workers.find_newcomers((1, 1)) == []


async def test_a_newcomer_that_was_to_be_replaced_enters_the_epoch_that_names_it(given: Fixture):
    workers = await given.open(IDLE)
    await until(lambda: 0 in workers.fresh)
    newcomer = workers.fresh[0]
    newcomer.joins = 3
    workers.recycle(0)
    assert workers.find_newcomers((1,)) == [newcomer]


async def test_the_last_words_of_a_script_are_kept(given: Fixture):
    await given.open("raise ValueError('no such data set')\n")
    worker = await given.death()
    assert worker.exit_text() == "exited with status 1"
    assert worker.tail.text().endswith("ValueError: no such data set")


async def test_with_a_worker_its_children_end_too(given: Fixture):
    child = given.memory / "child"
    await given.open(
        "import os, subprocess, sys, time\n"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(child)!r} + '.part', 'w').write(str(p.pid))\n"
        f"os.rename({str(child)!r} + '.part', {str(child)!r})\n"
        "time.sleep(600)\n"
    )
    await until(child.exists)
    os.kill(given.workers.fresh[0].pid, signal.SIGKILL)
    await given.death()
    await until(lambda: is_gone(int(child.read_text())))


async def test_lives_are_counted_and_every_one_below_is_over(given: Fixture):
    workers = await given.open(IDLE, count=2)
    os.kill(workers.fresh[1].pid, signal.SIGKILL)
    await given.death()
    workers.ensure_fresh()
    await until(lambda: workers.processes.lives == [1, 2])
    assert [e.life for e in workers.processes.ended_lives()] == [0, 1]


async def test_a_worker_that_cannot_be_started_now_is_started_later_and_no_life_is_lost(
    given: Fixture, monkeypatch: pytest.MonkeyPatch
):
    workers = await given.open(IDLE)
    os.kill(workers.fresh[0].pid, signal.SIGKILL)
    await given.death()
    monkeypatch.setattr(workers.processes, "_memory", str(given.memory / "missing"))
    for _ in range(2):
        workers.ensure_fresh()
        await until(lambda: not workers.starting)
    assert workers.fresh == {}
    assert given.said.getvalue().count("cannot start a worker") == 1
    monkeypatch.undo()
    workers.ensure_fresh()
    await until(lambda: 0 in workers.fresh)
    assert workers.fresh[0].life == 2
    assert [e.life for e in workers.processes.ended_lives()] == [1]


def look_until(watch: HangWatch, at: float, end: float) -> None:
    """Look every second, so that no look finds that the agent stood still."""
    while at < end:
        watch.look(LIMITS, at)
        at += 1.0
    watch.look(LIMITS, end)


async def test_a_worker_that_never_says_hello_is_hung_after_the_startup_limit(given: Fixture):
    workers = await given.open(IDLE)
    watch = HangWatch(workers, lambda: None, logline.Log(given.said))
    (found,) = workers.processes.alive
    now = time.monotonic()
    watch.look(LIMITS, now)
    watch.look(LIMITS, now + 100.0)
    assert not found.hung, "the container was frozen"
    look_until(watch, now + 101.0, now + 104.0)
    assert "has not called everstep.run within" in found.hung
    assert (await given.death()).exit_text() == found.hung


async def test_a_worker_that_was_held_and_does_not_park_after_the_cut_is_hung(given: Fixture):
    workers = await given.open(IDLE)
    watch = HangWatch(workers, lambda: None, logline.Log(given.said))
    (found,) = workers.processes.alive
    now = time.monotonic()
    found.page.write(Position(epoch=1, applied=3, scope=Where.STEP, since=now))
    found.state, found.started_at = State.HELD, now
    watch.look(LIMITS, now + 6.0)
    assert not found.hung, "it may hold for as long as it is told to"
    found.cut_at = now + 6.0
    watch.look(LIMITS, now + 6.0)
    assert "6 s in step 3, after it was applied" in found.hung
    assert (await given.death()).exit_text() == found.hung


async def test_a_worker_that_waits_for_a_chunk_of_the_checkpoint_is_not_hung(given: Fixture):
    """However long the store takes: the limit of the start-up begins anew with each chunk."""
    workers = await given.open(IDLE)
    watch = HangWatch(workers, lambda: None, logline.Log(given.said))
    (found,) = workers.processes.alive
    now = time.monotonic()
    found.page.write(Position(epoch=1, scope=Where.STARTUP, since=now))
    found.state, found.started_at, found.fetches = State.STARTED, now, 1
    look_until(watch, now, now + 60.0)
    assert not found.hung
    found.fetches, found.fetched_at = 0, now + 60.0
    look_until(watch, now + 60.0, now + 64.0)
    assert not found.hung
    look_until(watch, now + 64.0, now + 66.0)
    assert "6 s in startup" in found.hung
    assert (await given.death()).exit_text() == found.hung


async def test_a_forked_worker_runs_a_function_and_reports_its_exit(tmp_path: Path):
    spawner = spawn.ForkSpawner(lambda: os._exit(7))
    child = await spawner.spawn(dict(os.environ))
    await until(lambda: is_gone(child.pid))
    assert spawn.describe_exit(spawn.reap(child.pid)) == "exited with status 7"
    os.close(child.stdout)
    os.close(child.stderr)


async def test_a_forked_worker_keeps_its_files_when_it_collects_garbage_of_its_parent():
    class Cycle:
        def __init__(self) -> None:
            self.itself = self
            self.ends = socket.socketpair()

    def use_the_same_numbers() -> None:
        for number in numbers:
            os.dup2(1, number)
        gc.collect()
        for number in numbers:
            os.fstat(number)
        os._exit(7)

    gc.collect()
    gc.disable()
    try:
        numbers = [end.fileno() for end in Cycle().ends]
        child = await spawn.ForkSpawner(use_the_same_numbers).spawn(dict(os.environ))
    finally:
        gc.enable()
    with warnings.catch_warnings(action="ignore", category=ResourceWarning):
        gc.collect()
    await until(lambda: is_gone(child.pid))
    assert spawn.describe_exit(spawn.reap(child.pid)) == "exited with status 7"
    os.close(child.stdout)
    os.close(child.stderr)


SHOW_LIMITS = "import resource\nprint(resource.getrlimit(resource.RLIMIT_NOFILE), flush=True)\n"


async def test_the_agent_may_open_all_files_that_it_can_and_the_worker_has_the_limit_as_it_was(
    tmp_path: Path,
) -> None:
    """Container runtimes set a limit of 1024, and a coordinator has two connections per pod."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lower = (512, before[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, lower)
    script = tmp_path / "script.py"
    script.write_text(SHOW_LIMITS)
    try:
        spawner = spawn.SubprocessSpawner(str(script), (), spawn.raise_open_files())
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
        worker = await spawner.spawn(os.environ)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    said = await asyncio.to_thread(os.read, worker.stdout, 100)
    assert said.decode().strip() == str(lower)
    await asyncio.to_thread(os.waitpid, worker.pid, 0)
    os.close(worker.stdout)
    os.close(worker.stderr)

"""The workers of one pod: their lives, from spawn to proof of death.

Each local rank has at most one worker in the epoch (`current`) and one that waits for the next
epoch (`fresh`); a fresh one is started as soon as the epoch breaks, so that it imports its
libraries while the old one still saves.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from everstep_agent import hang, link, logline, messages, output, spawn
from everstep_agent.messages import State
from everstep_agent.signals import happens
from everstep_contract import env, position, wire

EXIT_SECONDS = 3.0
"""How long a worker has to end by itself after Exit."""
REAP_POLL_SECONDS = 0.02


@dataclass(slots=True, eq=False)
class Worker:
    local: int
    life: int
    pid: int
    page: position.PositionPage
    page_path: str
    spawned_at: float
    tail: output.Tail = field(default_factory=output.Tail)
    state: State = State.SPAWNED
    writer: asyncio.StreamWriter | None = None
    epoch: int = 0
    rank: int = 0
    ready_at: float | None = None
    started_at: float | None = None
    cut_at: float | None = None
    dead_at: float | None = None
    asked: bool = False
    """Exit was sent, or we killed it ourselves because its epoch is over."""
    parked: wire.Parked | None = None
    tracked: wire.Tracked | None = None
    applied: wire.Applied | None = None
    staged: int = 0
    stays: bool = False
    """It was told to stay at a boundary: its parking there is no break."""
    finished: int = 0
    failed: messages.FailureReport | None = None
    hung: str = ""
    hung_since: float | None = None
    status: int | None = None
    last: position.Position = field(default_factory=position.Position)
    asking: tuple[int, int] | None = None
    """Request id and step of an AtBoundary that has no answer yet."""
    saving: int | None = None
    """Step of the post-mortem save that it was asked for."""
    saving_since: float | None = None
    """Not None: that save is not staged yet."""
    unsaved: bool = False
    """What it staged then could not be used."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    order: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Keeps this worker's one-way store frames before its later requests."""

    @property
    def alive(self) -> bool:
        return self.state is not State.DEAD

    def send(self, frame: Any, id: int = 0) -> None:
        if self.writer is not None and not self.writer.is_closing():
            self.writer.write(wire.encode(frame, id))

    def position(self) -> position.Position:
        if self.alive:
            with contextlib.suppress(ValueError):
                self.last = self.page.read()
        return self.last

    def kill(self) -> None:
        if self.alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def exit_words(self) -> str:
        return self.hung or spawn.describe_exit(self.status)


class WorkerSet:
    """Not thread-safe; everything happens on the agent's loop. `on_change` is called after every
    change of state.
    """

    def __init__(
        self,
        *,
        spawner: spawn.Spawner,
        count: int,
        memory: str,
        environ: Mapping[str, str],
        on_frame: Callable[[Worker, wire.Envelope], None],
        on_death: Callable[[Worker], None],
        log: logline.Log,
    ) -> None:
        self._spawner = spawner
        self.count = count
        self._memory = memory
        self._environ = environ
        self._on_frame = on_frame
        self._on_death = on_death
        self._log = log
        self.lives = [0] * count
        self.over: list[set[int]] = [set() for _ in range(count)]
        self.current: dict[int, Worker] = {}
        self.fresh: dict[int, Worker] = {}
        self._all: dict[int, Worker] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._unspawned = ""
        self.link: link.Link[Worker] = link.Link(
            memory, find=self._all.get, on_frame=on_frame, log=log
        )

    async def open(self) -> None:
        await self.link.open()

    @property
    def pids(self) -> set[int]:
        return set(self._all)

    def ensure_fresh(self) -> None:
        """Called again and again: what cannot be started now (no room, no process) is not given up."""
        for local in range(self.count):
            if local not in self.fresh:
                try:
                    self.fresh[local] = self._spawn(local)
                except OSError as error:
                    self.lives[local] -= 1  # it never was
                    self._say_unspawned(local, f"cannot start a worker: {error}")

    def _say_unspawned(self, local: int, message: str) -> None:
        if message != self._unspawned:
            self._unspawned = message
            self._log.say("worker_waits", local=local, message=message)

    def ready_lives(self) -> tuple[int, ...]:
        ready = [self.fresh[i] for i in range(self.count) if i in self.fresh]
        if len(ready) < self.count or any(w.state is not State.READY for w in ready):
            return ()
        return tuple(w.life for w in ready)

    def ended_lives(self) -> tuple[messages.Ended, ...]:
        """Per local rank the highest life below which every one is over."""
        found = []
        for local, over in enumerate(self.over):
            life = 0
            while life + 1 in over:
                life += 1
            found.append(messages.Ended(local=local, life=life))
        return tuple(found)

    def begin(self, build: Callable[[Worker], wire.Start]) -> None:
        """The fresh workers enter the epoch."""
        self.current, self.fresh = self.fresh, {}
        for worker in self.current.values():
            start = build(worker)
            worker.epoch, worker.rank = start.epoch, start.rank
            worker.started_at = time.monotonic()
            if worker.alive:
                worker.state = State.STARTED
            worker.send(start)

    def cut(self, epoch: int) -> None:
        for worker in self.current.values():
            if worker.cut_at is None:
                worker.cut_at = time.monotonic()
                worker.send(wire.Cut(epoch=epoch))

    def end_current(self) -> None:
        for worker in self.current.values():
            if worker.alive and not worker.asked:
                self._background(self._end(worker))

    def group_over(self) -> bool:
        """No worker of ours is in an epoch any more."""
        return all(not w.alive for w in self.current.values())

    async def end_all(self) -> None:
        await asyncio.gather(*(self._end(w) for w in list(self._all.values())))

    async def close(self) -> None:
        for worker in list(self._all.values()):
            worker.kill()
        await asyncio.gather(*(w.ended.wait() for w in list(self._all.values())))
        await self.link.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _end(self, worker: Worker) -> None:
        """A worker that waits for us may flush and leave; any other is in user code and is killed."""
        worker.asked = True
        worker.send(wire.Exit())
        gentle = worker.state in (State.READY, State.PARKED, State.FINISHED, State.FAILED)
        if gentle:
            await happens(worker.ended, EXIT_SECONDS)
        worker.kill()
        await worker.ended.wait()

    def _spawn(self, local: int) -> Worker:
        self.lives[local] += 1
        life = self.lives[local]
        path = os.path.join(self._memory, f"position-{local}-{life}")
        page = position.PositionPage(path, create=True)
        environ = {
            **self._environ,
            env.AGENT_SOCKET: self.link.path,
            env.POSITION_FILE: path,
            "PYTHONUNBUFFERED": "1",
        }
        child = self._spawner.spawn(environ)
        worker = Worker(
            local=local,
            life=life,
            pid=child.pid,
            page=page,
            page_path=path,
            spawned_at=time.monotonic(),
        )
        self._all[child.pid] = worker
        copies = [
            self._copy(worker, child.stdout, error=False),
            self._copy(worker, child.stderr, error=True),
        ]
        self._background(self._watch(worker, child, copies))
        self._log.say("worker_spawned", local=local, life=life, pid=child.pid)
        return worker

    def _copy(self, worker: Worker, fd: int, *, error: bool) -> asyncio.Task[None]:
        def prefix() -> str:
            return f"[{worker.epoch}/{worker.rank}] " if worker.epoch else ""

        tail = worker.tail if error else None
        return asyncio.create_task(output.copy_lines(fd, error=error, prefix=prefix, tail=tail))

    async def _watch(
        self, worker: Worker, child: spawn.Spawned, copies: list[asyncio.Task[None]]
    ) -> None:
        try:
            await _wait_ended(worker.pid)
        except asyncio.CancelledError:
            for task in copies:
                task.cancel()
            worker.ended.set()  # nobody is left who could tell: whoever waits must not wait for ever
            raise
        worker.position()
        status = spawn.reap(worker.pid)
        await asyncio.wait(copies, timeout=0.5)
        for task in copies:
            task.cancel()
        await asyncio.gather(*copies, return_exceptions=True)
        child.keep = None
        self._bury(worker, status)

    def _bury(self, worker: Worker, status: int | None) -> None:
        worker.status, worker.dead_at = status, time.monotonic()
        worker.state = State.DEAD
        self.over[worker.local].add(worker.life)
        self._all.pop(worker.pid, None)
        worker.page.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(worker.page_path)
        if self.fresh.get(worker.local) is worker:
            del self.fresh[worker.local]
        worker.ended.set()
        self._on_death(worker)

    def _background(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def check_hangs(self, limits: hang.Limits, now: float) -> list[Worker]:
        """Workers that have just been found hung; each is asked for its stack and then killed."""
        found = []
        for worker in list(self._all.values()):
            if not worker.hung and not worker.asked and (hung := _hung(worker, limits, now)):
                worker.hung, worker.hung_since = hung.message, now - hung.seconds
                self._background(self._put_down(worker))
                found.append(worker)
        return found

    async def _put_down(self, worker: Worker) -> None:
        if worker.started_at is not None:  # faulthandler is registered by then
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGUSR1)
            await asyncio.sleep(0.3)
        worker.kill()


def _hung(worker: Worker, limits: hang.Limits, now: float) -> hang.Hang | None:
    silent = now - worker.spawned_at
    if worker.state is State.SPAWNED and silent > limits.startup:
        text = f"hung: no word for {silent:.0f} s since it was started"
        return hang.Hang(scope="startup", seconds=silent, message=text)
    if worker.saving_since is not None and now - worker.saving_since > limits.step:
        spent = now - worker.saving_since
        text = f"hung: {spent:.0f} s in a save, the limit is {limits.step:.0f} s"
        return hang.Hang(scope="save", seconds=spent, message=text)
    if worker.state not in (State.STARTED, State.TRACKED) or worker.asking is not None:
        return None
    return hang.classify_hang(
        worker.position(),
        started=worker.started_at or now,
        cut=worker.cut_at,
        limits=limits,
        now=now,
    )


async def _wait_ended(pid: int) -> None:
    """Until the child is a zombie; it is not reaped here."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        await _poll_ended(pid)
        return
    loop = asyncio.get_running_loop()
    done = loop.create_future()

    def ended() -> None:
        if not done.done():
            done.set_result(None)

    loop.add_reader(fd, ended)
    try:
        await done
    finally:
        loop.remove_reader(fd)
        os.close(fd)


async def _poll_ended(pid: int) -> None:
    while not _has_ended(pid):  # noqa: ASYNC110 only where the kernel has no pidfd
        await asyncio.sleep(REAP_POLL_SECONDS)


def _has_ended(pid: int) -> bool:
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True

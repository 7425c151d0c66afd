"""The workers of one pod, from spawn to proof of death.

Each local rank has at most one worker in the epoch (`current`) and one that waits for the next
epoch (`fresh`). A fresh one is started as soon as the epoch breaks, so that it imports its
libraries while the old one still saves.
"""

import asyncio
import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from everstep_agent import logline
from everstep_agent.checkpoint.files import delete_beside
from everstep_agent.peers.agent_report import Ended, State
from everstep_agent.pod import exiting, output, spawn, worker_socket
from everstep_agent.pod.worker import Worker
from everstep_agent.waiting import happens
from everstep_contract import env, position, wire

EXIT_SECONDS = 3.0
"""Limit for a worker to end by itself after Exit."""
KILL_SECONDS = 30.0
"""Limit for a process to end after SIGKILL (the kernel needs 75 µs per MB of its memory). Beyond it
the process is stuck: it waits in the kernel for a device that does not answer, and its pod is given
up.
"""
STOPPED_SECONDS = 2.0
"""This agent looks more often, so in a longer pause it did not run."""
OUTPUT_SECONDS = 0.5
"""Limit for reading the last lines of a worker that has ended; the rest is lost."""
KILLED_OUTPUT_SECONDS = 0.01
"""The same for a worker that SIGKILL has ended: its last lines do not tell the cause."""
KILLED_FRAMES_SECONDS = 0.001
"""Limit for reading the last frames and lines of a killed worker that is still exiting, while its
socket and pipes are open. If another signal than SIGKILL has ended it, its lines tell the cause, so
this is repeated until its pipe is empty, for at most `OUTPUT_SECONDS`.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where workers run, and how many."""

    count: int
    memory: str
    """Folder for their pages and sockets."""
    environ: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Events:
    """What is called, on the agent's event loop."""

    on_frame: Callable[[Worker, wire.Envelope], None]
    on_last_frame: Callable[[Worker], None]
    """Everything is read that an ended worker has sent; it may be before or after its death."""
    on_death: Callable[[Worker], None]
    """A worker is proven dead. It holds its memory and device until it is gone."""
    on_gone: Callable[[], None]
    """A worker's process is reaped."""
    on_error: Callable[[BaseException], None]
    """One of these has raised an exception, or this module has: a bug in Everstep. What would have
    followed does not happen.
    """


class WorkerSet:
    """Not thread-safe: everything runs on the agent's event loop."""

    def __init__(
        self,
        *,
        spawner: spawn.Spawner,
        place: Place,
        events: Events,
        log: logline.Log,
    ) -> None:
        self._spawner = spawner
        self.count = count = place.count
        self._memory = memory = place.memory
        self._environ = {**place.environ, "PYTHONUNBUFFERED": "1"}
        self._events = events
        self._log = log
        self.lives = [0] * count
        self.over: list[set[int]] = [set() for _ in range(count)]
        self.current: dict[int, Worker] = {}
        self.fresh: dict[int, Worker] = {}
        self.gone: dict[int, Worker] = {}
        """Workers that had got ready to join an epoch, and have ended or are being ended. The epoch
        may have been planned before that, and then names them.
        """
        self._all: dict[int, Worker] = {}
        """By pid, until they are reaped."""
        self._starts: dict[int, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._unspawned = ""
        self._looked_at = math.inf
        """When `find_stuck` was last called."""
        self.link: worker_socket.Link[Worker] = worker_socket.Link(
            memory,
            find=self._all.get,
            on_frame=events.on_frame,
            on_end=events.on_last_frame,
            on_error=events.on_error,
            log=log,
        )

    async def open(self) -> None:
        await self._spawner.open(self._environ, self._log)
        await self.link.open()

    @property
    def pids(self) -> set[int]:
        """Children that are reaped here or by the spawner."""
        return {*self._all, *self._spawner.pids}

    @property
    def alive(self) -> list[Worker]:
        return [worker for worker in self._all.values() if worker.alive]

    @property
    def starting(self) -> Collection[int]:
        """Local ranks whose next worker has no process yet."""
        return self._starts.keys()

    def ensure_fresh(self, but: Collection[int] = ()) -> None:
        """Start a fresh worker for each local rank that has none, except `but`.

        Called repeatedly, so a start that fails now (no memory, no process slot) is tried again.
        """
        for local in range(self.count):
            if local not in self.fresh and local not in self._starts and local not in but:
                start = self._starts[local] = asyncio.create_task(self._start(local))
                start.add_done_callback(partial(self._started, local))

    async def _start(self, local: int) -> None:
        try:
            self.fresh[local] = await self._spawn(local)
        except Exception as error:
            self._log_unspawned(local, f"cannot start a worker: {error}")

    def _started(self, local: int, task: asyncio.Task[None]) -> None:
        if self._starts.get(local) is task:
            del self._starts[local]

    def _log_unspawned(self, local: int, message: str) -> None:
        if message != self._unspawned:
            self._unspawned = message
            self._log.say("worker_waits", local=local, message=message)

    def heard(self, worker: Worker) -> None:
        """The worker has sent Hello, so it owns the lock in its page: watch for its death."""
        exiting.watch_killed(worker.page_path, worker.pid, worker.note_killed)

    def ready_lives(self) -> tuple[int, ...]:
        """The lives of the fresh workers, by local rank; 0: that rank is in an epoch.

        Empty unless a worker is ready for each of the other ranks and no killed process still holds
        their devices.
        """
        return self._fresh_lives(lambda worker: worker.state is State.READY)

    def prepared_lives(self) -> tuple[int, ...]:
        """The same for fresh workers that have got ready to join a running epoch."""
        return self._fresh_lives(lambda worker: worker.joins != 0 and worker.tracked is not None)

    def _fresh_lives(self, is_ready: Callable[[Worker], bool]) -> tuple[int, ...]:
        missing = [local for local in range(self.count) if not self.trains(local)]
        held = {w.local for w in self._all.values() if not w.alive}
        ready = {n: w.life for n, w in self.fresh.items() if is_ready(w) and n not in held}
        if not missing or any(local not in ready for local in missing):
            return ()
        return tuple(ready[n] if n in missing else 0 for n in range(self.count))

    def can_regroup(self) -> bool:
        """Whether all living workers can keep their step when others are lost."""
        workers = [*self.current.values(), *self.fresh.values()]
        return all(w.in_place for w in workers if w.alive and w.state is not State.SPAWNED)

    def trains(self, local: int) -> bool:
        """Whether this rank has a living worker in an epoch."""
        return local in self.current and self.current[local].alive

    def prepare(self, lives: Sequence[int], build: Callable[[Worker], wire.Start]) -> None:
        """Make these fresh workers get ready to join the running epoch."""
        for worker in [w for w in self.fresh.values() if lives[w.local] == w.life]:
            start = build(worker)
            worker.joins, worker.unit, worker.state = start.epoch, start.unit, State.STARTED
            worker.started_at = time.monotonic()
            worker.send(start)

    def recycle(self, epoch: int) -> None:
        """End the fresh workers that got ready for another epoch, because they cannot go back."""
        for worker in list(self.fresh.values()):
            if worker.joins not in (0, epoch):
                self._forget_fresh(worker)
                self._background(self._end(worker))

    def _forget_fresh(self, worker: Worker) -> None:
        del self.fresh[worker.local]
        if worker.joins:
            self.gone[worker.local] = worker

    def find_newcomers(self, lives: Sequence[int]) -> list[Worker]:
        """The workers that got ready to join and have these lives, including those that have ended.

        Empty if there are none, or if a rank with one of these lives is neither here nor a member.
        """
        found = []
        for local, life in enumerate(lives):
            ready = (self.fresh.get(local), self.gone.get(local))
            newcomer = next((w for w in ready if w and w.joins and w.life == life), None)
            if newcomer is not None:
                found.append(newcomer)
            elif life and not self._is_current(local, life):
                return []
        return found

    def _is_current(self, local: int, life: int) -> bool:
        return local in self.current and self.current[local].life == life

    def enter(self, lives: Sequence[int]) -> list[Worker]:
        """Make these newcomers members. One that has ended becomes a member, too: its death counts
        in that epoch.
        """
        entered = self.find_newcomers(lives)
        for worker in entered:
            self.current[worker.local] = worker
            if self.fresh.get(worker.local) is worker:
                del self.fresh[worker.local]
        self.gone.clear()
        return entered

    def ended_lives(self) -> tuple[Ended, ...]:
        """For each local rank, the number up to which all its processes have ended."""
        found = []
        for local, over in enumerate(self.over):
            life = 0
            while life + 1 in over:
                life += 1
            found.append(Ended(local=local, life=life))
        return tuple(found)

    def begin(self, build: Callable[[Worker], wire.Start]) -> None:
        """The fresh workers enter the epoch."""
        self.current, self.fresh, self.gone = self.fresh, {}, {}
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

    def hold(self, epoch: int) -> None:
        """Make the workers leave their group and keep their step, once per epoch."""
        for worker in self.current.values():
            if worker.alive and worker.held != epoch:
                worker.held = epoch
                worker.send(wire.Cut(epoch=epoch, keep=True))

    def are_current(self, lives: Sequence[int]) -> bool:
        """Whether the workers in the present epoch have these lives. A life of 0 is ignored."""
        return all(self._is_current(local, life) for local, life in enumerate(lives) if life)

    def are_fresh(self, lives: Sequence[int]) -> bool:
        """The same for fresh workers."""
        mine = {local: worker.life for local, worker in self.fresh.items()}
        return all(mine.get(local) == life for local, life in enumerate(lives) if life)

    def continue_in(self, lives: Sequence[int], build: Callable[[Worker], wire.Regroup]) -> None:
        """These workers enter the next epoch in place. A worker that has died since the epoch was
        planned enters it, too: its death then counts in that epoch.
        """
        self.current = {n: w for n, w in self.current.items() if lives[n] == w.life}
        for worker in self.current.values():
            frame = build(worker)
            worker.epoch, worker.rank = frame.epoch, frame.rank
            worker.standing, worker.asked_vector, worker.keeping = None, False, None
            worker.not_formed = ""
            worker.staged = worker.whole = 0  # what is not committed by now is dropped
            worker.unsaved = False
            worker.store_errors.clear()
            worker.send(frame)

    def end_current(self) -> None:
        for worker in self.current.values():
            if worker.alive and not worker.asked:
                self._background(self._end(worker))

    def end_ranks(self, ranks: Collection[int]) -> None:
        """Kill these ranks at once: they cannot continue, and nobody needs what they hold."""
        for worker in self.current.values():
            if worker.rank in ranks and worker.alive and not worker.asked:
                worker.asked = True
                self._log.say("unit_lost", rank=worker.rank, pid=worker.pid)
                worker.kill()

    def group_over(self) -> bool:
        """Whether no local worker is in an epoch any more."""
        return all(not w.alive for w in self.current.values())

    def all_stand(self) -> bool:
        """Whether all living workers have reported their standing in a regroup."""
        return all(w.standing is not None for w in self.current.values() if w.alive)

    async def end_all(self) -> None:
        await self._cancel_starts()
        await asyncio.gather(*(self._end(w) for w in list(self._all.values())))

    async def close(self) -> None:
        await self._cancel_starts()
        await self._spawner.close()
        for worker in list(self._all.values()):
            worker.kill()
        # A process that does not end in that time is left running.
        waits = (happens(w.ended, KILL_SECONDS) for w in list(self._all.values()))
        await asyncio.gather(*waits)
        await self.link.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _cancel_starts(self) -> None:
        starts = list(self._starts.values())
        for start in starts:
            start.cancel()
        await asyncio.gather(*starts, return_exceptions=True)

    async def _end(self, worker: Worker) -> None:
        """A worker that waits for the agent may flush and exit; any other is in user code and is
        killed.
        """
        worker.asked = True
        worker.send(wire.Exit())
        gentle = worker.state in (State.READY, State.PARKED, State.FINISHED, State.FAILED)
        if gentle:
            await happens(worker.ended, EXIT_SECONDS)
        worker.kill()
        await happens(worker.ended, KILL_SECONDS)

    async def _spawn(self, local: int) -> Worker:
        life = self.lives[local] + 1
        path = os.path.join(self._memory, f"position-{local}-{life}")
        page = position.PositionPage(path, create=True)
        environ = {
            **self._environ,
            env.AGENT_SOCKET: self.link.path,
            env.POSITION_FILE: path,
        }
        try:
            child = await self._spawner.spawn(environ)
        except BaseException:
            page.close()
            os.unlink(path)
            raise
        self.lives[local] = life
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
            status = await self._wait_dead(worker, child, copies)
            if worker.alive:
                killed = status is not None and spawn.was_killed(status)
                seconds = KILLED_OUTPUT_SECONDS if killed else OUTPUT_SECONDS
                await asyncio.wait(copies, timeout=seconds)
                self._bury(worker, status)
        except BaseException:
            for task in copies:
                task.cancel()
            worker.ended.set()  # its end can no longer be detected: release all waiters
            raise
        self._all.pop(worker.pid, None)
        worker.ended.set()
        self._events.on_gone()
        await asyncio.wait(copies, timeout=OUTPUT_SECONDS)
        for task in copies:
            task.cancel()
        await asyncio.gather(*copies, return_exceptions=True)
        child.keep = None

    async def _wait_dead(
        self, worker: Worker, child: spawn.Spawned, copies: list[asyncio.Task[None]]
    ) -> int | None:
        """Wait until the worker is reaped; returns its wait status. If a signal is proven to have
        ended the worker before that, bury it then.
        """
        gone = asyncio.create_task(spawn.wait_ended(worker.pid))
        killed = asyncio.create_task(worker.killed.wait())
        try:
            await asyncio.wait((gone, killed), return_when=asyncio.FIRST_COMPLETED)
            if not gone.done():
                spawn.kill_group(worker.pid)
                if worker.killed_by != signal.SIGKILL:
                    await self._read_last_lines(child, copies)
                await asyncio.wait(copies, timeout=KILLED_FRAMES_SECONDS)
                self._bury(worker, worker.killed_by)
            await gone
        finally:
            gone.cancel()
            killed.cancel()
            await asyncio.gather(gone, killed, return_exceptions=True)
        return spawn.reap(worker.pid)

    async def _read_last_lines(
        self, child: spawn.Spawned, copies: list[asyncio.Task[None]]
    ) -> None:
        """Wait until everything that the ended process has written to stderr is read."""
        limit = time.monotonic() + OUTPUT_SECONDS
        while output.is_unread(child.stderr) and time.monotonic() < limit:
            await asyncio.wait(copies, timeout=KILLED_FRAMES_SECONDS)

    def _bury(self, worker: Worker, status: int | None) -> None:
        worker.position()
        worker.status, worker.dead_at = status, time.monotonic()
        worker.killed_at = worker.killed_at or worker.dead_at
        worker.state = State.DEAD
        self.over[worker.local].add(worker.life)
        worker.page.close()
        Path(worker.page_path).unlink(missing_ok=True)
        delete_beside(self._list_slots(worker))  # the other ranks wait for the report of this death
        if self.fresh.get(worker.local) is worker:
            self._forget_fresh(worker)
        self._events.on_death(worker)

    def _list_slots(self, worker: Worker) -> Iterator[Path]:
        """The files that the worker used for staged copies. A copy that is still to be uploaded has
        another name.
        """
        return Path(self._memory, "staging").glob(f"slot-{worker.pid}-*")

    def _background(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._events.on_error(error)

    def find_stuck(self, now: float) -> list[Worker]:
        """Workers that have just been found to survive SIGKILL. Time in which this agent did not look
        does not count: a paused machine runs neither it nor the kernel that ends the process.
        """
        stopped = max(0.0, now - self._looked_at - STOPPED_SECONDS)
        self._looked_at, found = now, []
        for worker in self._all.values():
            if worker.killed_at is None or worker.stuck:
                continue
            worker.frozen += min(stopped, now - worker.killed_at)
            lasted = now - worker.killed_at - worker.frozen
            if lasted > KILL_SECONDS:
                where = spawn.describe_state(worker.pid)
                worker.stuck = (
                    f"has not ended {lasted:.0f} s after SIGKILL (pid {worker.pid}{where})"
                )
                found.append(worker)
        return found

    def put_down(self, worker: Worker, stack_seconds: float) -> None:
        """Kill a worker, after `stack_seconds` in which it can write its stack."""
        self._background(self._put_down(worker, stack_seconds))

    async def _put_down(self, worker: Worker, stack_seconds: float) -> None:
        if stack_seconds and worker.started_at is not None:  # faulthandler is registered by then
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGUSR1)
            await asyncio.sleep(stack_seconds)
        worker.kill()

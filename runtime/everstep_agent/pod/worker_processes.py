"""The processes of one pod's workers, from spawn to proof of death."""

import asyncio
import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
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


class Processes:
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
        self._memory = place.memory
        self._environ = {**place.environ, "PYTHONUNBUFFERED": "1"}
        self._events = events
        self._log = log
        self.lives = [0] * place.count
        """By local rank: the number of its newest process."""
        self.over: list[set[int]] = [set() for _ in range(place.count)]
        """By local rank: the numbers of those that have ended."""
        self._all: dict[int, Worker] = {}
        """By pid, until they are reaped."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._looked_at = math.inf
        """When `find_stuck` was last called."""
        self.link: worker_socket.Link[Worker] = worker_socket.Link(
            place.memory,
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
    def dying(self) -> list[Worker]:
        """Workers that are proven dead, and still hold their memory and device."""
        return [worker for worker in self._all.values() if not worker.alive]

    def ended_lives(self) -> tuple[Ended, ...]:
        """For each local rank, the number up to which all its processes have ended."""
        found = []
        for local, over in enumerate(self.over):
            life = 0
            while life + 1 in over:
                life += 1
            found.append(Ended(local=local, life=life))
        return tuple(found)

    def heard(self, worker: Worker) -> None:
        """The worker has sent Hello, so it owns the lock in its page: watch for its death."""
        exiting.watch_killed(worker.page_path, worker.pid, worker.note_killed)

    async def start(self, local: int) -> Worker:
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
        self._events.on_death(worker)

    def _list_slots(self, worker: Worker) -> Iterator[Path]:
        """The files that the worker used for staged copies. A copy that is still to be uploaded has
        another name.
        """
        return Path(self._memory, "staging").glob(f"slot-{worker.pid}-*")

    def end_aside(self, worker: Worker) -> None:
        """Start to `end` it, and do not wait for that."""
        self._background(self.end(worker))

    async def end(self, worker: Worker) -> None:
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

    async def end_all(self) -> None:
        await asyncio.gather(*(self.end(w) for w in list(self._all.values())))

    async def close(self) -> None:
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

    def _background(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._events.on_error(error)

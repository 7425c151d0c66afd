"""The workers of one pod: which of them are in the epoch, and which wait for the next.

Each local rank has at most one worker in the epoch (`current`) and one that waits for the next
epoch (`fresh`). A fresh one is started as soon as the epoch breaks, so that it imports its
libraries while the old one still saves.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

from everstep_agent import logline
from everstep_agent.peers.agent_report import State
from everstep_agent.pod import spawn
from everstep_agent.pod.worker import Worker
from everstep_agent.pod.worker_processes import Events, Place, Processes
from everstep_contract import wire


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
        self.count = place.count
        self._events = events
        self._log = log
        self.processes = Processes(
            spawner=spawner, place=place, events=replace(events, on_death=self._died), log=log
        )
        self.current: dict[int, Worker] = {}
        self.fresh: dict[int, Worker] = {}
        self.gone: dict[int, Worker] = {}
        """Workers that had got ready to join an epoch, and have ended or are being ended. The epoch
        may have been planned before that, and then names them.
        """
        self._starts: dict[int, asyncio.Task[None]] = {}
        self._unspawned = ""

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
            self.fresh[local] = await self.processes.start(local)
        except Exception as error:
            self._log_unspawned(local, f"cannot start a worker: {error}")

    def _started(self, local: int, task: asyncio.Task[None]) -> None:
        if self._starts.get(local) is task:
            del self._starts[local]

    def _log_unspawned(self, local: int, message: str) -> None:
        if message != self._unspawned:
            self._unspawned = message
            self._log.say("worker_waits", local=local, message=message)

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
        held = {w.local for w in self.processes.dying}
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
                self.processes.end_aside(worker)

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
                self.processes.end_aside(worker)

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

    def _died(self, worker: Worker) -> None:
        if self.fresh.get(worker.local) is worker:
            self._forget_fresh(worker)
        self._events.on_death(worker)

    async def end_all(self) -> None:
        await self._cancel_starts()
        await self.processes.end_all()

    async def close(self) -> None:
        await self._cancel_starts()
        await self.processes.close()

    async def _cancel_starts(self) -> None:
        starts = list(self._starts.values())
        for start in starts:
            start.cancel()
        await asyncio.gather(*starts, return_exceptions=True)

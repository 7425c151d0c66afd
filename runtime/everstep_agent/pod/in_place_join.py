"""How a pod joins a running epoch.

The invited pod gets its fresh workers ready while the epoch runs. They copy the state of members,
and the agent copies the ledger of a member's agent. A member that has lost some of its ranks does
the same for the ranks' next workers, but its agent has the ledger already.
"""

import time

from everstep_agent import logline
from everstep_agent.identity import Identity
from everstep_agent.peers.agent_report import State
from everstep_agent.peers.epoch_level import EpochLevel, EpochMember
from everstep_agent.pod.fetch_ledger import LedgerFetcher
from everstep_agent.pod.worker import Worker
from everstep_agent.pod.worker_start import build_join, find_member
from everstep_agent.pod.workers import WorkerSet
from everstep_contract import env, wire


class InPlaceJoin:
    def __init__(
        self,
        settings: env.AgentEnv,
        me: Identity,
        workers: WorkerSet,
        ledger: LedgerFetcher,
        line: logline.Log,
    ) -> None:
        self._settings = settings
        self._me = me
        self._workers = workers
        self._ledger = ledger
        self._line = line
        self._has_ledger = False
        """This pod is a member, and its fresh workers replace lost ranks."""

    def find_place(self, level: EpochLevel | None) -> EpochMember | None:
        """This pod's place in an epoch that continues with the workers that got ready for it, even
        if some of its workers have ended since; None: there is none.
        """
        if level is None or level.in_place is None:
            return None
        mine = level.member(*self._me.id)
        return mine if mine and self._workers.find_newcomers(mine.lives) else None

    def follow(self, level: EpochLevel | None) -> None:
        """Do what the invitation asks for.

        Workers that got ready are replaced if the invitation is gone, or if another worker that it
        names has ended: the next invitation will name new workers. They are also replaced if their
        unit now consists of other processes, because they have formed the unit's groups already.
        """
        invited = level.joining if level is not None and level.live else ()
        mine = next((m for m in invited if m.id == self._me.id), None)
        if level is None or mine is None:
            self.recycle(0, "the pod is no longer invited")
            return
        if not self._workers.are_fresh(mine.lives):
            self.recycle(0, "another worker that the invitation names has ended")
            return

        def build(worker: Worker) -> wire.Start:
            return build_join(self._settings, worker.local, level, mine)

        prepared = [w for w in self._workers.fresh.values() if w.joins == level.number]
        if any(worker.unit != build(worker).unit for worker in prepared):
            self.recycle(0, "its unit consists of other processes now")
            return
        self.recycle(level.number, f"the pod is invited to epoch {level.number} now")
        if self._workers.ready_lives() == mine.lives:
            self._workers.prepare(mine.lives, build)
        self._take(level)

    def recycle(self, epoch: int, why: str) -> None:
        """As `WorkerSet.recycle`. Says which workers end, and why: nothing else would show it."""
        for worker in self._workers.fresh.values():
            if worker.joins not in (0, epoch):
                self._line.say(
                    "newcomer_replaced",
                    local=worker.local,
                    life=worker.life,
                    pid=worker.pid,
                    epoch=worker.joins,
                    reason=why,
                )
        self._workers.recycle(epoch)

    def _take(self, level: EpochLevel) -> None:
        mine = [t for t in level.transfers if t.slot == self._me.slot]
        self._has_ledger = level.member(*self._me.id) is not None
        if mine and not self._has_ledger:
            self._ledger.ask(mine[0].key, find_member(level, mine[0].giver).address)
        for transfer in mine:
            worker = self._workers.fresh.get(transfer.local)
            if worker is not None and worker.joins and transfer.key not in worker.orders:
                worker.orders.add(transfer.key)
                worker.takes_since, worker.taking = time.monotonic(), None
                worker.send(wire.TakeState(epoch=level.number, key=transfer.key))

    def give(self, level: EpochLevel) -> None:
        """Make this pod's workers send their state to newcomers, as the epoch's transfers say."""
        for transfer in level.transfers:
            for worker in self._workers.current.values():
                if worker.rank == transfer.giver and transfer.key not in worker.orders:
                    worker.orders.add(transfer.key)
                    worker.send(wire.GiveState(epoch=level.number, key=transfer.key))

    def taken(self, worker: Worker, frame: wire.StateTaken) -> None:
        if frame.problem:
            self._line.say("state_not_taken", local=worker.local, message=frame.problem)
            self.recycle(0, "a worker of this pod did not take the state")
        else:
            worker.taken = frame.applied
            self._say_taken(worker, frame)

    def _say_taken(self, worker: Worker, frame: wire.StateTaken) -> None:
        took = time.monotonic() - (worker.takes_since or time.monotonic())
        size = worker.taking.received if worker.taking is not None else None
        self._line.say(
            "state_taken", local=worker.local, step=frame.applied, bytes=size, ms=round(took * 1000)
        )

    def count_bytes(self) -> tuple[int, int]:
        """How many bytes of the state all joining workers have received, and how many they will."""
        taking = [w.taking for w in self._workers.fresh.values() if w.joins and w.taking]
        return sum(t.received for t in taking), sum(t.expected for t in taking)

    @property
    def step(self) -> int | None:
        """The step whose state all joining workers and the agent hold; None: they do not yet."""
        if not self._ledger.done and not self._has_ledger:
            return None
        steps = {worker.taken for worker in self._workers.fresh.values() if worker.joins}
        return steps.pop() if len(steps) == 1 else None

    def enter(self, mine: EpochMember) -> list[Worker]:
        """Make the workers that got ready members of the epoch."""
        self._ledger.forget()
        entered = self._workers.enter(mine.lives)
        for worker in entered:
            if worker.alive:
                worker.state = State.HELD
        return entered

"""The agent's part in an armed boundary: it acknowledges the boundary if no local worker has
reached it yet. Also orders the saves after a cut and during a hold.
"""

from collections.abc import Iterable

from everstep_agent.peers.agent_report import State
from everstep_agent.peers.epoch_level import EpochLevel
from everstep_agent.pod.worker import Worker
from everstep_contract import wire


class Arming:
    """One per epoch. `acked` is the boundary that every local worker will still reach; 0: none."""

    def __init__(self) -> None:
        self.acked = 0

    def arm(self, level: EpochLevel, workers: Iterable[Worker]) -> bool:
        """Arm the level's boundary in every worker, and acknowledge it if none has reached it yet.

        The positions are read after arming, so a worker that is found before the boundary cannot
        miss it. Returns whether there is something to report.
        """
        step = level.boundary.step if level.boundary and level.live else 0
        if step == self.acked:
            return False
        local = list(workers)
        for worker in local:
            if worker.alive:
                worker.page.armed = step
        if step == 0 or all(w.position().applied < step for w in local):
            self.acked = step
        return True

    def passed(self, level: EpochLevel | None, workers: Iterable[Worker]) -> int:
        """The furthest local step if the boundary could not be acknowledged; 0 otherwise."""
        boundary = level.boundary if level else None
        if boundary is None or boundary.step == self.acked:
            return 0
        return max((w.position().applied for w in workers), default=0)

    def answer(self, level: EpochLevel, workers: Iterable[Worker]) -> None:
        """Answer the workers that wait at a boundary, once it is confirmed or was raised."""
        boundary = level.boundary if level.live else None
        for worker in workers:
            if worker.asking is None or not worker.alive:
                continue
            id, step = worker.asking
            if boundary is None or boundary.step != step:
                worker.asking = None
                worker.send(wire.BoundaryReply(raised=True), id)
            elif boundary.confirmed:
                worker.asking = None
                worker.stays = boundary.stay
                reply = wire.BoundaryReply(
                    save=not boundary.hold,
                    near=boundary.near,
                    stay=boundary.stay,
                    hold=boundary.hold,
                    epoch=level.number,
                )
                worker.send(reply, id)


def order_save(level: EpochLevel, workers: Iterable[Worker], now: float) -> None:
    """Order the chosen ranks to save, once they are parked and only once per step."""
    saver = level.saver
    if saver is None:
        return
    for worker in workers:
        ready = worker.rank in level.savers and worker.state is State.PARKED
        if ready and worker.saving != saver.step:
            worker.saving, worker.saving_since = saver.step, now
            worker.send(wire.Save(epoch=level.number, step=saver.step))


def order_held_save(level: EpochLevel, workers: Iterable[Worker]) -> None:
    """Order the chosen ranks to save while they hold their step, only once per step."""
    saver = level.saver
    if saver is None:
        return
    for worker in workers:
        ready = worker.rank in level.savers and worker.state is State.HELD
        if ready and worker.keeping != saver.step:
            worker.keeping = saver.step
            worker.send(wire.SaveHeld(epoch=level.number, step=saver.step))

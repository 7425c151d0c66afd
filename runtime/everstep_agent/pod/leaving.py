"""When the workers of a member that leaves end: at their next boundary. If they ended in the middle of a step, the
others would have to compute the passes of that step that are lost with them, and perhaps make its sums twice.
"""

from collections.abc import Sequence

from everstep_agent.peers.agent_report import State
from everstep_agent.peers.epoch_level import EpochLevel, Stage
from everstep_agent.pod.worker import Worker
from everstep_contract.position import Where

BOUNDARY_SECONDS = 5.0
"""How long they may take to their boundary. In a longer step, what the others do again is a small part."""
NOTICE_SECONDS = 2.0
"""They end at least this long before the end of the pod's notice, as in `leave_in_place.LEAVE_SECONDS`."""


class Leaving:
    """One per epoch. `step` is the boundary at which the workers end; 0: they have not been told to."""

    def __init__(self) -> None:
        self.step = 0
        self._until = 0.0

    def may_end(
        self, level: EpochLevel, workers: Sequence[Worker], now: float, notice: float | None
    ) -> bool:
        """Whether the workers of this leaving member end now. Called with each level and each look, and when a
        worker asks at a boundary.

        Args:
            notice: seconds until the pod ends; None: nobody has told it to end.
        """
        alive = [worker for worker in workers if worker.alive]
        if level.stage is not Stage.RUNNING or level.boundary or not all(map(_steps, alive)):
            return True
        if not self.step:
            longest = BOUNDARY_SECONDS if notice is None else notice - NOTICE_SECONDS
            self._until = now + min(longest, BOUNDARY_SECONDS)
            self.step = _arm(alive)
        # Once one rank has applied the step, its sums are complete on all: the others need nothing of these workers.
        return now >= self._until or any(worker.asking for worker in alive)

    def stay(self) -> None:
        """The member does not leave, perhaps because the next coordinator did not know of it. A worker that asks
        at the boundary is answered as at any other.
        """
        self.step = 0


def _steps(worker: Worker) -> bool:
    """Whether it is within a step."""
    return worker.state is State.TRACKED and worker.position().scope is Where.STEP


def _arm(workers: Sequence[Worker]) -> int:
    """Have the workers ask at the first boundary that none of them can miss, and return it.

    The positions are read after arming, as in `arming.Arming.arm`.
    """
    step = 0
    while (ahead := 1 + max((w.position().applied for w in workers), default=0)) > step:
        step = ahead
        for worker in workers:
            worker.page.armed = step
    return step

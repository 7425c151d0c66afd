"""When the next near save is made, and which one is kept. Pure.

A near save stays in the memory of the pods, and in that of their partners. It is uploaded only if no whole copy of the
model is left and the run goes back to it. So it is made only where one loss can take the last copy: where ranks hold
parts of the model, or where there is one rank.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from everstep_agent.peers.epoch_level import EpochLevel, Stage

STALLS = 100
"""A near save is not made more often than so many times what the last one delayed the steps: it costs 1 % at most."""
COPY_FACTOR = 10
"""How long to wait for the copies of a near save, in multiples of `max_redo_seconds`."""
STEPS_BEFORE_SAVE = 3
"""None is made if another save is due in so many steps."""


def is_wanted(epoch: EpochLevel, limit: float) -> bool:
    alone = epoch.mesh.unit > 1 or epoch.world == 1
    return limit > 0 and alone and epoch.stage is Stage.RUNNING and not epoch.unclaimed


def is_save_near(step: int, every: int) -> bool:
    """Whether a save at an interval of `every` steps follows this step soon; 0: there is none."""
    return every > 0 and -step % every <= STEPS_BEFORE_SAVE


@dataclass(slots=True, kw_only=True)
class NearSaves:
    """Seconds by one clock."""

    made_at: float
    """When the state was taken that a loss would go back to."""
    kept: int = 0
    """As `EpochLevel.kept`."""
    _held: int = 0
    _held_at: float = 0.0
    _armed: int = 0
    _armed_at: float = 0.0
    _stalled: float = 0.0
    """Seconds for which saves had delayed each rank, when the last near save was armed."""
    _took: float = 0.0
    _cost: float = 0.0

    def arm(self, step: int, stalled: float, now: float) -> None:
        """One is made at this step, or at a later one if the boundary is raised."""
        self._armed, self._armed_at, self._stalled = step, now, stalled

    def follow(
        self,
        held: int,
        copied: int | None,
        *,
        stalled: Callable[[], float],
        limit: float,
        now: float,
    ) -> int:
        """The step to keep: older near saves are dropped.

        Args:
            held: the newest step of which every member holds its parts.
            copied: the newest step that lies in the partners' memory, too; None: there are no partners.
            stalled: seconds for which saves have delayed each rank so far.
            limit: `max_redo_seconds`.
        """
        if held > self._held:
            self._held, self._held_at = held, now
            if held >= self._armed > self.kept:
                self._cost = max(0.0, stalled() - self._stalled)
        late = now - self._held_at >= COPY_FACTOR * limit
        if self._held > self.kept and (copied is None or copied >= self._held or late):
            made = self._armed_at if self._held >= self._armed > self.kept else self._held_at
            self.kept, self.made_at, self._took = self._held, made, now - made
        return self.kept

    def is_due(self, limit: float, now: float) -> bool:
        """At a loss the state that is kept is then at most `limit` seconds old, if making one takes less than half of
        that and delays no step.
        """
        pending = self._armed > self.kept and now - self._armed_at < COPY_FACTOR * limit
        interval = max(limit - self._took, limit / 2, STALLS * self._cost)
        return not pending and now - self.made_at >= interval

    def renew(self) -> "NearSaves":
        """For an epoch that goes on in place: what its members held of the former one is dropped."""
        return NearSaves(made_at=-math.inf, _took=self._took, _cost=self._cost)

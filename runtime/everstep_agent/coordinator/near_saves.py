"""When the next near save is made, and which one is kept. Pure.

A near save stays in the memory of the pods and of their partners. It is uploaded only if no whole
copy of the model is left and the run goes back to it. So near saves are made only if one loss can
destroy the last copy: if each rank holds a part of the model, or if there is only one rank.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from everstep_agent.peers.epoch_level import EpochLevel, Stage

STALLS = 100
"""The interval between near saves is at least this many times the delay that the last one caused,
so they cost 1 % at most.
"""
COPY_FACTOR = 10
"""How long to wait for the copies of a near save, in multiples of `max_redo_seconds`."""
STAGE_FACTOR = 2
"""The same until every pod holds its part. Then a pod had no room for it, and another near save is made."""
STEPS_BEFORE_SAVE = 3
"""No near save is made if another save is due within this many steps."""


def is_wanted(epoch: EpochLevel, limit: float) -> bool:
    alone = epoch.mesh.unit > 1 or epoch.world == 1
    return limit > 0 and alone and epoch.stage is Stage.RUNNING and not epoch.unclaimed


def is_save_near(step: int, every: int) -> bool:
    """Whether a save every `every` steps follows this step soon; `every` 0: no such saves."""
    return every > 0 and -step % every <= STEPS_BEFORE_SAVE


@dataclass(slots=True, kw_only=True)
class NearSaves:
    """When near saves are made and kept. All times are in seconds of one clock."""

    made_at: float
    """When the state to which a loss would go back was copied."""
    kept: int = 0
    """As `EpochLevel.kept`."""
    _held: int = 0
    _held_at: float = 0.0
    _armed: int = 0
    _armed_at: float = 0.0
    _stalled: float = 0.0
    """Seconds for which saves had delayed each rank when the last near save was armed."""
    _took: float = 0.0
    _cost: float = 0.0

    def arm(self, step: int, stalled: float, now: float) -> None:
        """Note that a near save is made at this step, or at a later one if the boundary is raised."""
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
        """Note how far the near saves are. Returns the step to keep: older near saves are dropped.

        Args:
            held: the newest step of which every member holds its parts.
            copied: the newest step that is in the partners' memory, too; None: there are no
                partners.
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
        """Whether to make a near save now. At a loss the kept state is then at most `limit` seconds
        old, provided that making a near save takes less than half of that and delays no step.
        """
        factor = COPY_FACTOR if self._held >= self._armed else STAGE_FACTOR
        pending = self._armed > self.kept and now - self._armed_at < factor * limit
        interval = max(limit - self._took, limit / 2, STALLS * self._cost)
        return not pending and now - self.made_at >= interval

    def renew(self) -> "NearSaves":
        """For an epoch that continues in place: the near saves of the former epoch are dropped."""
        return NearSaves(made_at=-math.inf, _took=self._took, _cost=self._cost)

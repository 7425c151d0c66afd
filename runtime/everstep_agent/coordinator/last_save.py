"""The save that all ranks wait for: the last one, or one at a boundary where the epoch ends.

Training continues past any other save, and the next save replaces it. No save follows this one. If
it is given up or does not arrive, one rank saves the full state, as after a loss.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from everstep_agent.coordinator.breaks import SAVE_LOST, Break
from everstep_agent.coordinator.saves import Saves
from everstep_agent.peers.agent_report import State, WorkerReport
from everstep_agent.peers.epoch_level import EpochLevel

LAST_SAVE_SECONDS = 900.0
"""Limit without a new part while the store works and no agent uploads. Each request of an upload has
its own limit, so an upload has none.
"""


@dataclass(slots=True, kw_only=True)
class Wait:
    """Progress of the awaited save: `parts` of `step` had arrived at `since`."""

    step: int = 0
    parts: int = 0
    since: float = 0.0


def find_awaited(epoch: EpochLevel, workers: Sequence[WorkerReport]) -> int:
    """The step whose commit all ranks wait for; 0: none."""
    if len(workers) < epoch.world or len({w.applied for w in workers}) != 1:
        return 0
    finished = all(w.state is State.FINISHED for w in workers)
    boundary = epoch.boundary
    stays = boundary is not None and boundary.confirmed and boundary.stay
    parked = all(w.state in (State.PARKED, State.FINISHED) for w in workers)
    step = workers[0].applied if finished or (stays and parked) else 0
    return step if step > epoch.committed else 0


def why_refused(epoch: EpochLevel, workers: Sequence[WorkerReport], saves: Saves) -> str:
    """Why the awaited save cannot be committed, whichever rank makes it; empty: no such reason."""
    step, why = saves.not_finite
    if not step or step != find_awaited(epoch, workers):
        return ""
    return (
        f"the state after step {step} cannot be saved: {why}. The newest checkpoint is that of step"
        f" {epoch.committed}"
    )


def find_lost(
    epoch: EpochLevel,
    workers: Sequence[WorkerReport],
    saves: Saves,
    wait: Wait,
    *,
    now: float,
    trouble: bool,
    uploading: bool,
) -> Break | None:
    """
    Args:
        trouble: this agent or another waits for the store.
        uploading: an agent has parts that it uploads.
    """
    step = find_awaited(epoch, workers)
    why = saves.why_given_up(epoch.number, step) if step else ""
    if step and not why:
        here = saves.count_parts(epoch.number, step)
        busy = saves.busy or trouble or uploading
        if (step, here) != (wait.step, wait.parts) or busy:
            wait.step, wait.parts, wait.since = step, here, now
        if now - wait.since >= LAST_SAVE_SECONDS:
            why = (
                f"{here} of {epoch.world} parts arrived, and none in the last {LAST_SAVE_SECONDS:.0f} "
                "s"
            )
    if not why:
        return None
    return Break(cause=SAVE_LOST, message=f"the save of step {step} failed: {why}")

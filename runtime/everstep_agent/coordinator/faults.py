"""What happens when coordinator code fails. Pure.

No step needs the coordinator, so its failure must not end the training: it gives up the role, the
epoch continues, and after a pause an agent takes the role again. That agent may meet the same bug,
and a job whose coordinator keeps failing cannot save or replace a member. So the last try only
saves the state and ends the job; if that fails, too, the job ends without a save.
"""

import traceback
from collections.abc import Sequence

from everstep_agent.identity import Identity
from everstep_agent.peers.epoch_level import EpochLevel, Stage
from everstep_agent.peers.messages import CoordinatorFault, End, Levels
from everstep_contract import report

REST_SECONDS = (2.0, 8.0, 30.0)
"""How long nobody takes the role after the first fault, the second, …. After the last of these
pauses comes the last try.
"""
WINDOW_SECONDS = 600.0
"""After this long without a fault, earlier faults no longer count."""
MESSAGE_CHARACTERS = 500
TRACE_CHARACTERS = 3000


def may_go_on(inherited: Levels) -> bool:
    """Whether the next coordinator continues the epoch as it is. It does not if ranks may be parked
    at a boundary for a purpose that only the former coordinator knew: then the epoch ends, as after
    any loss of a coordinator.
    """
    epoch = inherited.epoch
    return inherited.laid_down and epoch is not None and may_continue(epoch)


def may_continue(epoch: EpochLevel) -> bool:
    if epoch.stage is not Stage.RUNNING:
        return False
    return epoch.boundary is None or not (epoch.boundary.stay or epoch.boundary.hold)


def choose_rest(faults: Sequence[CoordinatorFault]) -> float:
    return REST_SECONDS[min(len(faults), len(REST_SECONDS)) - 1] if faults else 0.0


def is_last_try(faults: Sequence[CoordinatorFault]) -> bool:
    return len(faults) >= len(REST_SECONDS)


def build_fault(me: Identity, error: BaseException) -> CoordinatorFault:
    trace = "".join(traceback.format_exception(error))
    return CoordinatorFault(
        slot=me.slot,
        attempt=me.attempt,
        message=f"{type(error).__name__}: {error}"[:MESSAGE_CHARACTERS] + _place(error),
        traceback=trace[-TRACE_CHARACTERS:],
    )


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno})" if frames else ""


def describe(faults: Sequence[CoordinatorFault]) -> str:
    last = faults[-1]
    return f"the coordinator in slot {last.slot} failed: {last.message}"


def build_note(faults: Sequence[CoordinatorFault]) -> tuple[str, ...]:
    """The notes in `seen`."""
    if not faults:
        return ()
    count = f" (fault {len(faults)} of {len(REST_SECONDS) + 1})"
    text = (
        f"{describe(faults)}{count}. Training continues, and an agent takes over as coordinator. This is a bug in "
        "Everstep: please report it with the agents' logs"
    )
    return (text,)


def build_message(faults: Sequence[CoordinatorFault]) -> str:
    return (
        f"a bug in Everstep, not in your code: coordinator code failed {len(faults)} "
        f"times in {WINDOW_SECONDS / 60:.0f} minutes; the last time {describe(faults)}. "
        "Report it with the agents' logs; a job of the same name continues from the "
        "newest checkpoint"
    )


def build_end(faults: Sequence[CoordinatorFault], *, epoch: int, step: int) -> End:
    return End(
        cause=report.Cause.COORDINATOR.value,
        message=build_message(faults),
        epoch=epoch,
        step=step,
        traceback=faults[-1].traceback,
    )

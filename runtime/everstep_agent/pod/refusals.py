"""Workers that could not join the running job: their script or data differ from those of the running ranks, or they
could not take over the state. Pure; times are time.monotonic().

The next worker probably fails, too, and each try stops the running ranks at a boundary for a
moment. So the pauses between two tries grow.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

PAUSE_SECONDS = (0.0, 5.0, 20.0, 60.0)
"""Before the next worker starts, by the number of failed tries in a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    count: int
    """Failed tries in a row."""
    message: str
    differs: bool
    """The last one failed because its script or data differ."""
    until: float


Refusals = Mapping[int, Refusal]
"""By local rank."""


def refuse(
    refusals: Refusals, local: int, message: str, now: float, *, differs: bool = False
) -> Refusals:
    count = refusals[local].count + 1 if local in refusals else 1
    pause = PAUSE_SECONDS[min(count, len(PAUSE_SECONDS)) - 1]
    new = Refusal(count=count, message=message, differs=differs, until=now + pause)
    return {**refusals, local: new}


def forget_failed(refusals: Refusals) -> Refusals:
    """Forget those that could not take over the state. To be called if all ranks restart from a checkpoint, because
    then nobody needs that state.
    """
    return {local: refusal for local, refusal in refusals.items() if refusal.differs}


def held_locals(refusals: Refusals, now: float) -> Collection[int]:
    """Local ranks whose next worker has to wait."""
    return {local for local, refusal in refusals.items() if now < refusal.until}


def describe(refusals: Refusals) -> str:
    """For the status; empty: none was refused."""
    if not refusals:
        return ""
    first = refusals[min(refusals)]
    again = "The other ranks train on. Everstep starts this rank again, after pauses that grow"
    if first.differs:
        return f"its rank cannot join: {first.message}. {again}"
    fix = "If that does not help, check its log, its node, and the node's network"
    return f"its rank could not join: {first.message}. {again}. {fix}"

"""Workers that could not join the running job, because their script or data differ from those of
the running ranks. Pure; times are time.monotonic().

The next worker is probably refused, too, and each try stops the running ranks at a boundary for a
moment. So the pauses between two tries grow.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

PAUSE_SECONDS = (0.0, 5.0, 20.0, 60.0)
"""Before the next worker starts, by the number of refusals in a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    count: int
    """Refusals in a row."""
    message: str
    until: float


Refusals = Mapping[int, Refusal]
"""By local rank."""


def refuse(refusals: Refusals, local: int, message: str, now: float) -> Refusals:
    count = refusals[local].count + 1 if local in refusals else 1
    pause = PAUSE_SECONDS[min(count, len(PAUSE_SECONDS)) - 1]
    return {**refusals, local: Refusal(count=count, message=message, until=now + pause)}


def held_locals(refusals: Refusals, now: float) -> Collection[int]:
    """Local ranks whose next worker has to wait."""
    return {local for local, refusal in refusals.items() if now < refusal.until}


def describe(refusals: Refusals) -> str:
    """For the status; empty: none was refused."""
    if not refusals:
        return ""
    message = refusals[min(refusals)].message
    return (
        f"its rank cannot join: {message}. The other ranks train on. Everstep starts this rank again, after pauses "
        f"of up to {PAUSE_SECONDS[-1]:.0f} s"
    )

"""The faults of a storm: their kinds, times and victims. Pure."""

import random
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    DEATH = "death"
    """A rank gets SIGKILL."""
    HANG = "hang"
    """A rank gets SIGSTOP."""
    NODE = "node"
    """All processes of a rank's node get SIGKILL at once."""


CALM, DEATHS, MIXED = "undisturbed", "deaths", "mixed"
MIXES: dict[str, tuple[Kind, ...]] = {
    CALM: (),
    DEATHS: (Kind.DEATH,),
    MIXED: (*[Kind.DEATH] * 6, *[Kind.HANG] * 3, Kind.NODE),
}
"""Name → the kinds of faults; each occurs as often as in this list."""
JITTER_SECONDS = 0.5
"""Each fault is delayed at random by up to this time, so that it can strike at any moment of a
step.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    after: float
    """Seconds after the storm began."""
    kind: Kind
    place: float
    """In [0, 1): chooses one of the ranks that are alive at that moment."""


def plan_strikes(mix: str, *, seconds: float, every: float, seed: int) -> tuple[Strike, ...]:
    """Plan a fault in the middle of each interval, so that the storm begins and ends with training.

    The kinds come in shuffled rounds; each round contains the complete mix.
    """
    chance = random.Random(seed)
    kinds: list[Kind] = []
    strikes: list[Strike] = []
    for number in range(int(seconds / every) if MIXES[mix] else 0):
        if not kinds:
            kinds = list(MIXES[mix])
            chance.shuffle(kinds)
        after = (number + 0.5) * every + chance.uniform(0, JITTER_SECONDS)
        strikes.append(Strike(after=after, kind=kinds.pop(), place=chance.random()))
    return tuple(strikes)

"""What a rank of a step's collectives is, and the gang of them."""

from typing import NamedTuple

from everstep_contract import wire
from simulation.protocol import survivors
from simulation.protocol.survivors import Kept

BETWEEN, LOOP, OUT, PAST, APPLYING = "between", "loop", "out", "past", "applying"
"""Where the main thread is: out of a loop; in it; behind a reduction that failed or does not count; the
regroup is known, but not yet whether a vector came with it; in the optimizer's step.
"""
VECTOR = "vector"
NOBODY = survivors.first(0, 0)


class Rank(NamedTuple):
    number: int
    kept: Kept
    at: str = BETWEEN
    todo: tuple[int, ...] = ()
    held: frozenset[int] = frozenset()
    """Micro-batches in its accumulators."""
    sent: int = 0
    """Epoch of the group in which its sums were launched; 0: they are not."""
    done: int = 0
    """Of these collectives, complete here: one thread, one after the other."""
    sums: tuple[int, ...] = ()
    """Epoch of the sum in each bucket of the reduced copy; 0: none."""
    reduced: int = 0
    """Reductions that it has delivered to its script."""
    last: tuple[int, ...] = ()
    """The epochs of the newest one's sums, and of its vector."""
    steps: int = 0
    attributed: int = 0
    """The epoch to which its newest step counts."""
    told: wire.Standing | None = None
    lacks: bool = False
    """It was handed the vector of sums that it does not hold."""


class Gang(NamedTuple):
    ranks: tuple[Rank, ...]
    dead: tuple[Rank, ...] = ()
    """As they stood."""
    members: tuple[tuple[int, ...], ...] = ()
    """Of each epoch."""
    orders: tuple[tuple[int, wire.Regroup], ...] = ()
    """On their way to a rank."""
    given: tuple[tuple[int, int, str], ...] = ()
    """Vectors that a rank handed over: (rank, epoch, value)."""
    deaths: int = 2
    stuck: str = ""
    """Why its survivors cannot go on in place."""

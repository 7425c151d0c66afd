"""The values of the reduction's model: a rank, and the gang of all ranks."""

from typing import NamedTuple

from everstep_contract import wire
from simulation.protocol import survivors
from simulation.protocol.survivors import Kept

BETWEEN, LOOP, OUT, PAST, APPLYING = "between", "loop", "out", "past", "applying"
"""Where the main thread is: outside a loop; in a loop; after a reduction that failed or does not
count; after the news of a regroup, when it is not known yet whether a vector came with it; in the
optimizer's step.
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
    """Epoch of the group in which its sums were launched; 0: not launched."""
    done: int = 0
    """How many of these collectives are complete on this rank; one thread runs them one after the
    other.
    """
    first: int = 0
    """The first bucket that it launched there; the others were complete."""
    sums: tuple[int, ...] = ()
    """Epoch of the sum in each bucket of the reduced copy; 0: none."""
    reduced: int = 0
    """Number of reductions that it has delivered to its script."""
    last: tuple[int, ...] = ()
    """The epochs of the newest reduction's sums and of its vector, then the reduction's number."""
    steps: int = 0
    attributed: int = 0
    """The epoch to which its newest step belongs."""
    told: wire.Standing | None = None
    lacks: bool = False
    """It received the vector of sums that it does not hold."""
    passes: tuple[int, ...] = ()
    """For ranks of units: the passes that it has made, each as in `Kept`."""
    inside: bool = False
    """For ranks of units: it is in the first pass of `todo`, and waits there for the rest of its
    unit.
    """


class Gang(NamedTuple):
    ranks: tuple[Rank, ...]
    dead: tuple[Rank, ...] = ()
    """The dead ranks, as they were when they died."""
    members: tuple[tuple[int, ...], ...] = ()
    """The members of each epoch."""
    orders: tuple[tuple[int, wire.Regroup], ...] = ()
    """Orders on their way to a rank: (rank, order)."""
    given: tuple[tuple[int, int, str], ...] = ()
    """Vectors that a rank handed over: (rank, epoch, value)."""
    deaths: int = 2
    stuck: str = ""
    """Why the survivors cannot continue in place."""
    level: int = 0
    """With units: the level that the coordinator has published, as numbered by `world.keep`."""
    broken: frozenset[int] = frozenset()
    """Units within which collectives fail although no rank has died."""
    still: bool = False
    """Nothing can happen any more."""

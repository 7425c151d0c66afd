"""How long this rank usually goes without a mark, and how long it may. Pure.

A *stretch* is the time between two marks on the position page. Limits are learnt from stretches in
which the rank computes, fetches data, or waits for a sum.
"""

import math
from collections import deque

from everstep_contract.position import Stretch

STEPS = 300
"""How many of the last steps count."""
LEARN_EVERY = 10
"""Steps between two updates of the limits."""
KNOWN_STEPS = 50
"""With fewer steps, no limit is learnt."""
FACTOR = {Stretch.COMPUTE: 3.0, Stretch.FETCH: 10.0, Stretch.SUM: 3.0}
"""The limit is this many times what 99 of 100 steps do not exceed."""
LEAST_SECONDS = {Stretch.COMPUTE: 0.3, Stretch.FETCH: 5.0, Stretch.SUM: 1.0}
"""No limit is shorter. For a sum: a connection that loses a packet and one retransmission of it is
silent for 0.6 s; with two retransmissions lost, for 1.4 s.
"""


class Stretches:
    """The longest stretch of each kind, in each of the last steps."""

    def __init__(self) -> None:
        self._longest = {kind: deque[float](maxlen=STEPS) for kind in FACTOR}
        self._step = dict.fromkeys(FACTOR, 0.0)
        self._limits = dict.fromkeys(Stretch, 0.0)
        self._steps = 0

    def add(self, kind: Stretch, seconds: float) -> None:
        """Add a stretch of the current step that has ended. Kinds without a limit are ignored."""
        if seconds > self._step.get(kind, math.inf):
            self._step[kind] = seconds

    def end_step(self) -> None:
        for kind, seconds in self._step.items():
            self._longest[kind].append(seconds)
            self._step[kind] = 0.0
        self._steps += 1
        if self._steps % LEARN_EVERY:
            return
        for kind, longest in self._longest.items():
            self._limits[kind] = _choose_limit(kind, longest)

    def limit(self, kind: Stretch) -> float:
        """Seconds that this rank may go without progress; 0: no limit is learnt. For a wait
        it is the limit of computing.
        """
        waits = kind in (Stretch.WAIT, Stretch.SUM)
        return self._limits[Stretch.COMPUTE if waits else kind]

    @property
    def group_limit(self) -> float:
        """Seconds for which nothing may move between the ranks while all wait for a sum; 0: no
        limit is learnt. It is not shorter than a rank's limit, so that a rank that is the cause is
        found first.
        """
        return max(self._limits[Stretch.SUM], self._limits[Stretch.COMPUTE])


def _choose_limit(kind: Stretch, longest: deque[float]) -> float:
    if len(longest) < KNOWN_STEPS:
        return 0.0
    usual = sorted(longest)[math.ceil(0.99 * len(longest)) - 1]
    return max(FACTOR[kind] * usual, LEAST_SECONDS[kind])

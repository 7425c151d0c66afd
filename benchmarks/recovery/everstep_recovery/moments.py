"""At which moment of a step the fault of a run comes. Pure.

The runs spread their faults evenly over the step. Random moments would not do: what a loss costs depends on
how much of the step is left, and a dozen random moments often leave out a fifth of the step.
"""

import random
from collections.abc import Sequence

from everstep_recovery.lines import Line
from everstep_recovery.splitting import STEPS, list_ends, measure_step

LEAD_SECONDS = 0.02
"""Least time from the plan to the fault."""
GOLDEN = 0.6180339887498949
"""Multiples of it, without their whole part, spread evenly, however many there are."""


def find_phase(run: int, seed: int) -> float:
    """The part of a step, from 0 to 1, at which the fault of this run comes."""
    return (random.Random(seed).random() + run * GOLDEN) % 1.0


def find_moment(lines: Sequence[Line], phase: float, least: float) -> float:
    """The first moment from `least` on at which this part of a step is over, if the next steps take as long as
    the former ones. `lines` are sorted by time.
    """
    ends = list_ends(lines)[-STEPS:]
    step = measure_step(ends)
    return least + (ends[-1] + phase * step - least) % step

"""What the ranks' clocks show for one block of time. Pure, except `read_marks`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

Marks = npt.NDArray[np.float64]
"""[steps, 2]: the end of each step in seconds (CLOCK_MONOTONIC), and the rank's CPU seconds by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A period in which one system ran and all others were stopped."""

    system: str
    begin: float
    end: float
    agents_cpu_s: float
    """CPU seconds of Everstep's agents in this period."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Seconds per step in one block."""

    wall_s: float
    """The mean over the steps of the slowest rank."""
    cpu_s: float
    """The sum over all ranks and their agents."""
    agents_cpu_s: float


def measure(block: Block, ranks: Sequence[Marks]) -> Measured:
    """Measure the steps that are within the block: at least one whole step of each rank."""
    walls, cpu = [], 0.0
    for marks in ranks:
        times = marks[:, 0]
        inside = marks[(times >= block.begin) & (times <= block.end)]
        wall, spent = (inside[-1] - inside[0]) / (len(inside) - 1)
        walls.append(float(wall))
        cpu += float(spent)
    wall_s = max(walls)
    agents = block.agents_cpu_s / (block.end - block.begin) * wall_s
    return Measured(wall_s=wall_s, cpu_s=cpu + agents, agents_cpu_s=agents)


def read_marks(path: Path) -> Marks:
    """The steps so far; [0, 2] if the file is not there."""
    if not path.exists() or not path.stat().st_size:
        return np.zeros((0, 2))
    marks = np.fromfile(path, np.float64).reshape(-1, 2)
    return marks[: int(np.count_nonzero(marks[:, 0]))]

"""Read the cuts from a run's log. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Cuts:
    learnt: tuple[str, ...]
    """Log lines of ranks that were cut out by a limit that they had learnt."""
    stuck: tuple[str, ...]
    """Log lines of sums that were taken for stuck, by limits that all ranks had learnt."""
    other: tuple[str, ...]
    """Log lines of ranks that were lost in another way."""


def read_cuts(lines: Iterable[str]) -> Cuts:
    learnt, stuck, other = [], [], []
    for line in lines:
        if "event=no_progress" in line:
            learnt.append(line.strip())
        elif "event=epoch_holds" in line and "cause=GroupStuck" in line:
            stuck.append(line.strip())
        elif "event=worker_ended" in line and "hung: no progress" not in line:
            other.append(line.strip())
    return Cuts(learnt=tuple(learnt), stuck=tuple(stuck), other=tuple(other))

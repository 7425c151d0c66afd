"""Names under which a checkpoint is to be pinned, and that are not in the run log yet. Pure.

A name is a level: the request stands until a commit carries the name, whatever happens to a single
save or a single coordinator. A run uses each name once, so a repeated request finds its checkpoint.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from everstep_agent.runlog.log_index import LogIndex


@dataclass(slots=True)
class Pins:
    _script: dict[str, int] = field(default_factory=dict)
    """Name → the first step whose checkpoint may have it."""
    _operator: tuple[str, int] = ("", 0)
    """The same for the name in `wanted`."""

    def ask(self, names: Iterable[str], step: int, log: LogIndex) -> list[str]:
        """Note the script's names for the checkpoint of `step`. Returns messages about used names."""
        notes = []
        for name in names:
            held = log.find_pin(name)
            if held is None:
                self._script.setdefault(name, step)
            elif held.step != step:
                notes.append(
                    f"step {step} is not pinned as {name}: the run has pinned step {held.step} under this"
                    " name, and uses a name once; use another name"
                )
            elif not log.is_on_lineage(held.epoch, held.step):
                notes.append(
                    f"step {step} is not pinned as {name}: this name stays with the checkpoint of step {held.step} of"
                    f" epoch {held.epoch}, from which the run does not continue; use another name"
                )
        return notes

    def want(self, name: str, step: int) -> None:
        """Note the operator's name; another name replaces the last one. `step`: the next that ends."""
        if name != self._operator[0]:
            self._operator = name, step

    def pinned(self, names: Iterable[str]) -> None:
        """Note that a commit carries these names."""
        for name in names:
            self._script.pop(name, None)

    def list_due(self, step: int, log: LogIndex) -> list[str]:
        """The names that a checkpoint of this step gets."""
        asked = [*self._script.items(), self._operator]
        due = {n for n, first in asked if n and first <= step and log.find_pin(n) is None}
        return sorted(due)

"""The training script's own log, independent of the job's status: rank, step, time and loss of each step.

One file per rank, `rank-<n>`, to which all its processes append; a line is written after the step was applied.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    rank: int
    step: int
    loss: float
    at: float
    """Seconds of the machine's monotonic clock."""
    pid: int


class StepLog:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("rank-*"):
            old.unlink()

    def read(self) -> list[Applied]:
        """All entries, ordered by time. An incomplete last line is left out."""
        found = [
            _parse(int(file.name.removeprefix("rank-")), line)
            for file in self.folder.glob("rank-*")
            for line in file.read_text().splitlines(keepends=True)
            if line.endswith("\n")
        ]
        return sorted(found, key=lambda a: a.at)


def find_first(log: Iterable[Applied], step: int, after: float) -> float | None:
    """The first time after `after` at which a rank applied `step`; None if no rank has yet.

    If a rank went back and applied the step twice, only its last time counts.
    """
    last = {a.rank: a.at for a in log if a.step == step}
    return min((at for at in last.values() if at > after), default=None)


def find_whole(log: Iterable[Applied], step: int, size: int, after: float) -> float | None:
    """When the last of `size` processes applied `step`, if that is after `after`; else None."""
    last = {a.pid: a.at for a in log if a.step == step and a.at > after}
    return max(last.values()) if len(last) >= size else None


def find_process(log: Iterable[Applied], rank: int, before: float) -> int | None:
    """The process that took this rank's last step before that time."""
    found = [a.pid for a in log if a.rank == rank and a.at <= before]
    return found[-1] if found else None


def list_pauses(log: Iterable[Applied], without: int | None) -> list[tuple[float, float]]:
    """(end, seconds) between each two consecutive steps, ordered by time, for all processes except
    `without`. A step ends when the last of them has applied it.
    """
    ends: dict[int, float] = {}
    for applied in log:
        if applied.pid != without:
            ends[applied.step] = max(applied.at, ends.get(applied.step, 0.0))
    return [(at, at - ends[step - 1]) for step, at in sorted(ends.items()) if step - 1 in ends]


def list_recomputed(log: Iterable[Applied], after: float = 0.0) -> list[int]:
    """Steps that a rank applied a second time after `after`."""
    seen: set[tuple[int, int]] = set()
    again: set[int] = set()
    for applied in sorted(log, key=lambda a: a.at):
        place = applied.rank, applied.step
        if place in seen and applied.at > after:
            again.add(applied.step)
        seen.add(place)
    return sorted(again)


@dataclass(frozen=True, slots=True, kw_only=True)
class Logs:
    """Differences between the script's log and that of the undisturbed run."""

    recomputed: tuple[int, ...]
    """Steps that a rank applied more than once."""
    missing: tuple[int, ...]
    """Steps that no rank logged."""
    other_losses: tuple[int, ...]
    """Steps in which a rank's loss differs from the undisturbed run's."""


def compare_logs(run: Sequence[Applied], undisturbed: Sequence[Applied], *, steps: int) -> Logs:
    ours, theirs = _list_losses(run), _list_losses(undisturbed)
    numbers = range(1, steps + 1)
    return Logs(
        recomputed=tuple(list_recomputed(run)),
        missing=tuple(s for s in numbers if s not in ours),
        other_losses=tuple(s for s in numbers if s in ours and ours[s] != theirs.get(s)),
    )


def _list_losses(log: Iterable[Applied]) -> dict[int, set[float]]:
    found: dict[int, set[float]] = {}
    for applied in log:
        found.setdefault(applied.step, set()).add(applied.loss)
    return found


def _parse(rank: int, line: str) -> Applied:
    step, loss, at, pid = line.split()
    return Applied(rank=rank, step=int(step), loss=float.fromhex(loss), at=float(at), pid=int(pid))

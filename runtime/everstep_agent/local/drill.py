"""A drill: one rank of a healthy run is killed, and the recovery is shown. Pure.

The drill waits for some steps first, so that the figures do not include the start of the run.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from everstep_contract import levels

STEPS = 10
"""Steps of all workers together before the kill."""

Life = tuple[int, int, int, int]


@dataclass(slots=True, kw_only=True)
class Drill:
    """Receives each new `Seen`, in order."""

    workers: int
    rank: int | None = None
    """The rank that was killed; None: none yet."""
    killed_at: float = 0.0
    first: int | None = None
    """The step at which all workers ran for the first time."""
    before: frozenset[Life] = frozenset()
    known: frozenset[str] = frozenset()
    """Incidents from before the kill."""
    whole_after: float | None = None
    """Seconds from the kill until all workers trained again; None: they do not yet."""

    def choose(self, seen: levels.Seen, pids: Mapping[int, int]) -> int | None:
        """The pid to kill now; None: it is not time yet, or the rank was killed already."""
        if self.rank is not None or not self._is_whole(seen):
            return None
        self.first = seen.step if self.first is None else self.first
        rank = max(m.rank for m in seen.members)
        if seen.step < self.first + STEPS or rank not in pids:
            return None
        self.rank, self.before = rank, _lives(seen)
        self.known = frozenset(i.id for i in seen.incidents)
        return pids[rank]

    def follow(self, seen: levels.Seen, now: float) -> bool:
        """Whether the drill is over: all workers train again, and each interruption has ended."""
        if self.rank is None:
            return False
        incidents = self._incidents(seen)
        closed = bool(incidents) and not any(i.open for i in incidents)
        if self.whole_after is None and closed and self._is_whole(seen):
            self.whole_after = now - self.killed_at
        return self.whole_after is not None

    def describe(self, seen: levels.Seen) -> list[str]:
        incidents = self._incidents(seen)
        lost = incidents[0]
        kept = len(self.before & _lives(seen))
        seconds = sum(p.ms for p in lost.phases) / 1000
        phases = ", ".join(f"{p.name.replace('_', ' ')} {p.ms} ms" for p in lost.phases)
        rows = (
            ("killed", f"rank {self.rank} of {self.workers} (SIGKILL)"),
            ("found", lost.message),
            ("next step of all", f"after {seconds:.2f} s ({phases})"),
            ("full size", f"after {self.whole_after or 0:.1f} s"),
            ("processes", f"{kept} of {self.workers} are the same, {self.workers - kept} new"),
            ("steps lost", str(sum(i.steps_lost for i in incidents))),
        )
        return [f"drill  {name:18} {text}" for name, text in rows]

    def _is_whole(self, seen: levels.Seen) -> bool:
        return seen.running and len(seen.members) == self.workers

    def _incidents(self, seen: levels.Seen) -> list[levels.RuntimeIncident]:
        return [i for i in seen.incidents if i.id not in self.known]


def _lives(seen: levels.Seen) -> frozenset[Life]:
    return frozenset((m.slot, m.attempt, m.incarnation, m.life) for m in seen.members)

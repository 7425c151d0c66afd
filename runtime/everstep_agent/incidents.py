"""One interruption, from its cause to the first new step, with the time that each phase took. Pure:
`now` is an argument.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from everstep_contract import levels

KEEP = 10
UNEXPLAINED = frozenset({"GroupBroken", "GroupStuck", "CoordinatorLost"})
"""Causes that name nobody: a better word replaces them."""
MESSAGE_CHARACTERS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    level: levels.RuntimeIncident
    since: float
    """When the phase that runs now began."""
    resume: int = 0

    def mark(self, phase: str, now: float) -> "Incident":
        """The phase that ran until now has this name; a phase is marked once."""
        if any(p.name == phase for p in self.level.phases):
            return self
        spent = levels.Phase(name=phase, ms=max(0, round((now - self.since) * 1000)))
        return replace(
            self, level=replace(self.level, phases=(*self.level.phases, spent)), since=now
        )

    def begin(self, since: float) -> "Incident":
        """It is known only now that it began earlier than `detect` says."""
        first, *rest = self.level.phases or (levels.Phase(name="detect", ms=0),)
        missed = round((self.since - since) * 1000) - sum(p.ms for p in (first, *rest))
        if missed <= 0 or first.name != "detect":
            return self
        phases = (replace(first, ms=first.ms + missed), *rest)
        return replace(self, level=replace(self.level, phases=phases))

    def explain(
        self, cause: str, message: str, slots: tuple[int, ...], rank: int | None
    ) -> "Incident":
        """A better word on the cause, once it is known; else what happened besides."""
        if self.level.cause not in UNEXPLAINED:
            return self.add(message, slots)
        slot = slots[0] if slots else None
        level = replace(self.level, cause=cause, message=message, slot=slot, slots=slots, rank=rank)
        return replace(self, level=level)

    def add(self, message: str, slots: tuple[int, ...]) -> "Incident":
        """What happens meanwhile belongs to it."""
        level = self.level
        if message not in level.message:
            both = message if message.startswith(level.message) else f"{level.message}; {message}"
            level = replace(level, message=both[:MESSAGE_CHARACTERS])
        known = (*((level.slot,) if level.slot is not None else ()), *level.slots)
        return replace(self, level=replace(level, slots=tuple(dict.fromkeys((*known, *slots)))))

    def resumes(self, step: int, lost: int) -> "Incident":
        """`lost` more steps are to be taken again, from `step`."""
        level = replace(self.level, step=step, steps_lost=self.level.steps_lost + lost)
        return replace(self, level=level, resume=step)

    def close(self, rung: str) -> "Incident":
        return replace(self, level=replace(self.level, rung=rung, open=False))


@dataclass(slots=True)
class Book:
    """The open incident and the last ones; one at a time, what happens meanwhile belongs to it."""

    closed: tuple[levels.RuntimeIncident, ...] = ()
    current: Incident | None = None

    def open(
        self,
        id: str,
        cause: str,
        message: str,
        *,
        now: float,
        slots: tuple[int, ...],
        rank: int | None = None,
    ) -> Incident:
        if self.current is not None:
            self.current = self.current.explain(cause, message, slots, rank)
            return self.current
        slot = slots[0] if slots else None
        level = levels.RuntimeIncident(
            id=id, cause=cause, message=message, slot=slot, slots=slots, rank=rank
        )
        self.current = Incident(level=level, since=now)
        return self.current

    def is_known(self, id: str) -> bool:
        return any(i.id == id for i in self.levels())

    def mark(self, phase: str, now: float) -> None:
        if self.current is not None:
            self.current = self.current.mark(phase, now)

    def close(self) -> levels.RuntimeIncident | None:
        if self.current is None:
            return None
        in_order = self.current.level.cause in levels.IN_ORDER
        ended = self.current.close("move" if in_order else "restart").level
        self.closed = (*self.closed, ended)[-KEEP:]
        self.current = None
        return ended

    def levels(self) -> tuple[levels.RuntimeIncident, ...]:
        now = (self.current.level,) if self.current else ()
        return (*self.closed, *now)[-KEEP:]

    @property
    def resumed(self) -> bool:
        """The next epoch runs: only its first step is missing."""
        phases = self.current.level.phases if self.current else ()
        return any(p.name == "restart" for p in phases)

    @property
    def id(self) -> str:
        return self.current.level.id if self.current else ""


def from_levels(known: Sequence[levels.RuntimeIncident], *, now: float) -> Book:
    """What a new coordinator inherits."""
    closed = tuple(i for i in known if not i.open)
    open_ = next((i for i in known if i.open), None)
    current = Incident(level=open_, since=now) if open_ else None
    return Book(closed=closed, current=current)

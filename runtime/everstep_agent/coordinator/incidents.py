"""Interruptions, each from its cause to the first new step, with the time of each phase. Pure:
`now` is an argument, and every change returns a new value.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from everstep_contract import levels

KEEP = 10
UNEXPLAINED = frozenset({"GroupBroken", "GroupStuck", "CoordinatorLost"})
"""Causes that name no member: a more precise cause replaces them."""
STARTED = frozenset({"form", "restart"})
"""The phase after which the next epoch's ranks step: in place, or after a restart."""
MESSAGE_CHARACTERS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why an interruption began, and which slots it hit."""

    name: str
    message: str
    slots: tuple[int, ...] = ()
    rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    level: levels.RuntimeIncident
    since: float
    """When the present phase began."""
    resume: int = 0

    def mark(self, phase: str, now: float) -> "Incident":
        """Ends the present phase and gives it this name; each phase is recorded once."""
        if any(p.name == phase for p in self.level.phases):
            return self
        spent = levels.Phase(name=phase, ms=max(0, round((now - self.since) * 1000)))
        return replace(
            self, level=replace(self.level, phases=(*self.level.phases, spent)), since=now
        )

    def detect(self, since: float, now: float) -> "Incident":
        """Ends the phase `detect`, which began at `since`, when the loss was first noticed."""
        began = self if self.level.phases else replace(self, since=since)
        return began.mark("detect", now)

    def begin(self, since: float) -> "Incident":
        """Extends the phase `detect` if the incident is found to have begun earlier."""
        first, *rest = self.level.phases or (levels.Phase(name="detect", ms=0),)
        missed = round((self.since - since) * 1000) - sum(p.ms for p in (first, *rest))
        if missed <= 0 or first.name != "detect":
            return self
        phases = (replace(first, ms=first.ms + missed), *rest)
        return replace(self, level=replace(self.level, phases=phases))

    def explain(self, cause: Cause) -> "Incident":
        """Replaces an unexplained cause by a more precise one; otherwise adds the message."""
        if self.level.cause not in UNEXPLAINED:
            return self.add(cause.message, cause.slots)
        return replace(self, level=_describe(self.level, cause))

    def add(self, message: str, slots: tuple[int, ...]) -> "Incident":
        """Adds something that happened during this incident."""
        level = self.level
        if message not in level.message:
            both = message if message.startswith(level.message) else f"{level.message}; {message}"
            level = replace(level, message=both[:MESSAGE_CHARACTERS])
        known = (*((level.slot,) if level.slot is not None else ()), *level.slots)
        return replace(self, level=replace(level, slots=tuple(dict.fromkeys((*known, *slots)))))

    def resumes(self, step: int, lost: int) -> "Incident":
        """Notes that `lost` more steps must be repeated, from `step`."""
        level = replace(self.level, step=step, steps_lost=self.level.steps_lost + lost)
        return replace(self, level=level, resume=step)

    def finds(self, step: int) -> "Incident":
        """Notes a later save than the one to resume from: fewer steps are repeated."""
        gained = min(self.level.steps_lost, max(0, step - self.level.step))
        return self.resumes(step, -gained) if gained else self

    def close(self) -> levels.RuntimeIncident:
        rung = "move" if self.level.cause in levels.IN_ORDER else self.level.rung or "restart"
        return replace(self.level, rung=rung, open=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Incidents:
    """The open incident and the newest closed ones. At most one is open, so one fault is one
    incident however many slots it hits: all losses until the first new step belong to it.
    """

    closed: tuple[levels.RuntimeIncident, ...] = ()
    current: Incident | None = None

    def open(self, id: str, cause: Cause, *, now: float) -> "Incidents":
        """Opens an incident, or adds the cause to the open one. If that is a planned change for
        which nobody has stopped yet, the loss of another slot is an incident of its own: the change
        is opened again after it.
        """
        if self.current is not None and not self._precedes_plan(cause):
            return replace(self, current=self.current.explain(cause))
        level = _describe(levels.RuntimeIncident(id=id, cause="", message=""), cause)
        return replace(self, current=Incident(level=level, since=now))

    def _precedes_plan(self, cause: Cause) -> bool:
        level = self.current.level if self.current else None
        if level is None or level.phases or level.cause not in levels.IN_ORDER:
            return False
        return cause.name not in levels.IN_ORDER and not {*cause.slots} & {*level.slots}

    def detect(self, since: float, now: float) -> "Incidents":
        return self._with(self.current and self.current.detect(since, now))

    def mark(self, phase: str, now: float) -> "Incidents":
        return self._with(self.current and self.current.mark(phase, now))

    def take_rung(self, rung: str) -> "Incidents":
        """Notes by which rung the open incident was recovered."""
        current = self.current
        return self._with(current and replace(current, level=replace(current.level, rung=rung)))

    def resumes(self, step: int, lost: int) -> "Incidents":
        return self._with(self.current and self.current.resumes(step, lost))

    def finds(self, step: int) -> "Incidents":
        return self._with(self.current and self.current.finds(step))

    def explain(self, cause: Cause, since: float | None) -> "Incidents":
        """`since`: when it began, if it began earlier than first recorded."""
        current = self.current
        if current is not None and since is not None:
            current = current.begin(since)
        return self._with(current and current.explain(cause))

    def close(self) -> "Incidents":
        if self.current is None:
            return self
        return Incidents(closed=(*self.closed, self.current.close())[-KEEP:])

    def _with(self, current: Incident | None) -> "Incidents":
        return replace(self, current=current)

    def levels(self) -> tuple[levels.RuntimeIncident, ...]:
        now = (self.current.level,) if self.current else ()
        return (*self.closed, *now)[-KEEP:]

    def is_known(self, id: str) -> bool:
        return any(i.id == id for i in self.levels())

    @property
    def resumed(self) -> bool:
        """Whether the next epoch runs and only its first step is missing."""
        return self.current is not None and _has_resumed(self.current.level)

    @property
    def id(self) -> str:
        return self.current.level.id if self.current else ""


def _describe(level: levels.RuntimeIncident, cause: Cause) -> levels.RuntimeIncident:
    slot = cause.slots[0] if cause.slots else None
    return replace(
        level,
        cause=cause.name,
        message=cause.message,
        slot=slot,
        slots=cause.slots,
        rank=cause.rank,
    )


def _has_resumed(level: levels.RuntimeIncident) -> bool:
    return any(p.name in STARTED for p in level.phases)


def find_phase(known: Sequence[levels.RuntimeIncident]) -> tuple[str, int]:
    """The open incident, and how many of its phases are over; they change when a phase begins."""
    return next(((i.id, len(i.phases)) for i in known if i.open), ("", 0))


def from_levels(
    known: Sequence[levels.RuntimeIncident], *, now: float, since: float | None = None
) -> Incidents:
    """The incidents that a new coordinator inherits.

    Args:
        since: when the present phase began, as far as this agent has heard. It does not count once
            the epoch runs, because the ranks may have stepped since, and nobody has seen it.
    """
    closed = tuple(i for i in known if not i.open)
    open_ = next((i for i in known if i.open), None)
    if open_ is None:
        return Incidents(closed=closed)
    began = now if since is None or _has_resumed(open_) else min(since, now)
    return Incidents(closed=closed, current=Incident(level=open_, since=began))

"""Values of the protocol's model: what is true at one moment of a job, small enough to enumerate.

One worker a pod, and no clock. A pod's knowledge is what it heard: its coordinator's levels; a
coordinator's is what it read of the log and the last report that it got from each pod.
"""

from functools import lru_cache
from typing import Any, NamedTuple

from everstep_agent.messages import AgentReport, Ended, EpochLevel, State, WorkerReport
from everstep_contract import levels
from everstep_contract.log import Entry

Place = tuple[int, int]
"""(slot, attempt)"""
History = tuple[int, ...]
"""Epoch in which each step was applied: what a state was trained by."""

_VALUES: list[Any] = [None]
_NUMBERS: dict[Any, int] = {None: 0}


def keep(value: Any) -> int:
    """A number for a value, the same for equal ones: worlds are compared and hashed millions of times."""
    number = _NUMBERS.setdefault(value, len(_VALUES))
    if number == len(_VALUES):
        _VALUES.append(value)
    return number


@lru_cache(maxsize=1 << 16)
def list_entries(kept: tuple[int, ...]) -> tuple[Entry, ...]:
    return tuple(_VALUES[n] for n in kept)


NONE, IN, PARKED, DEAD, OVER = "none", "in", "parked", "dead", "over"
LIVING = (IN, PARKED)


class Snap(NamedTuple):
    """What a pod reports."""

    slot: int
    attempt: int
    incarnation: int = 1
    life: int = 0
    """Of the worker that is, or was last, in an epoch."""
    work: str = NONE
    epoch: int = 0
    step: int = 0
    joined: int = 0
    cut: int = 0

    @property
    def place(self) -> Place:
        return self.slot, self.attempt

    @property
    def free(self) -> bool:
        """Its worker has left its group, and a fresh one is ready."""
        return self.work not in LIVING


class Pod(NamedTuple):
    snap: Snap
    up: bool = True
    history: History = ()
    kept: int = 0
    """The newest epoch that it heard of."""
    follows: Place | None = None

    @property
    def level(self) -> EpochLevel | None:
        found: EpochLevel | None = _VALUES[self.kept]
        return found


class Coordinator(NamedTuple):
    place: Place
    read: int = 0
    """Entries of the log that it knows."""
    view: tuple[Snap, ...] = ()
    round: int = 0
    burnt: int = 0
    kept: int = 0
    """The level of its epoch."""
    saved: tuple[int, int, History] | None = None
    """(epoch, step, …) of a save that is complete and not committed."""

    @property
    def level(self) -> EpochLevel | None:
        found: EpochLevel | None = _VALUES[self.kept]
        return found


class World(NamedTuple):
    log: tuple[int, ...] = ()
    pods: tuple[Pod, ...] = ()
    coordinators: tuple[Coordinator, ...] = ()
    current: tuple[int, ...] = ()
    """The attempt of each slot that the operator wants."""
    gone: frozenset[Place] = frozenset()
    links: frozenset[frozenset[Place]] = frozenset()
    """Pairs that do not reach each other."""
    given_up: frozenset[Place] = frozenset()
    """Members that were out of reach for longer than is waited for what they hold."""
    faults: tuple[str, ...] = ()
    """Still to strike."""
    content: tuple[tuple[str, History], ...] = ()
    """What each manifest that was ever committed holds."""

    def entries(self, count: int | None = None) -> tuple[Entry, ...]:
        return list_entries(self.log[:count])

    def pod(self, place: Place) -> Pod | None:
        return next((p for p in self.pods if p.snap.place == place), None)

    def linked(self, a: Place, b: Place) -> bool:
        return a == b or frozenset((a, b)) not in self.links

    def with_pod(self, pod: Pod) -> "World":
        others = [p for p in self.pods if p.snap.place != pod.snap.place]
        return self._replace(pods=tuple(sorted([*others, pod], key=lambda p: p.snap.place)))

    def coordinator(self, place: Place) -> Coordinator | None:
        return next((c for c in self.coordinators if c.place == place), None)

    def with_coordinator(self, one: Coordinator) -> "World":
        others = [c for c in self.coordinators if c.place != one.place]
        found = tuple(sorted([*others, one], key=lambda c: c.place))
        return self._replace(coordinators=found)

    def without_coordinator(self, place: Place) -> "World":
        left = tuple(c for c in self.coordinators if c.place != place)
        return self._replace(coordinators=left)

    def held(self, manifest: str) -> History:
        return dict(self.content)[manifest]


@lru_cache(maxsize=1 << 16)
def build_report(snap: Snap) -> AgentReport:
    """As `pod.build_report` would tell it."""
    worker = WorkerReport(
        local=0,
        life=snap.life,
        pid=1,
        state={IN: State.TRACKED, PARKED: State.PARKED}.get(snap.work, State.DEAD),
        applied=snap.step,
        sound=True,
        why={DEAD: "killed by SIGKILL", PARKED: "its group was cut"}.get(snap.work, ""),
    )
    return AgentReport(
        slot=snap.slot,
        attempt=snap.attempt,
        incarnation=snap.incarnation,
        address=f"{snap.slot}-{snap.attempt}",
        joined=snap.joined,
        cut=snap.cut,
        epoch=snap.epoch,
        workers=(worker,) if snap.life else (),
        fresh=(snap.life + 1,) if snap.free else (),
        ended=(Ended(local=0, life=snap.life if snap.free else snap.life - 1),)
        if snap.life
        else (),
    )


@lru_cache(maxsize=1 << 12)
def build_wanted(current: tuple[int, ...], gone: frozenset[Place], least: int) -> levels.Wanted:
    return levels.Wanted(
        min_workers=least,
        want_workers=len(current),
        max_workers=len(current),
        peers=tuple(
            levels.Peer(slot=s, attempt=a, address=f"{s}-{a}") for s, a in enumerate(current)
        ),
        gone=tuple(levels.SlotAttempt(slot=s, attempt=a) for s, a in sorted(gone)),
    )

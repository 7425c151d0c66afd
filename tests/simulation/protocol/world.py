"""Values of the protocol's model: the state of a job at one moment, small enough to enumerate.

Each pod has one worker, and there is no clock. A pod knows what it has heard: its coordinator's
levels. A coordinator knows what it has read of the log, the operator's messages that have reached
it (`words`: each declares a pod gone), and the last report of each pod.
"""

from functools import lru_cache
from typing import Any, NamedTuple

from everstep_agent.peers.agent_report import AgentReport, Ended, State, WorkerReport
from everstep_agent.peers.epoch_level import EpochLevel, Stage
from everstep_agent.runlog import rules as runlog_rules
from everstep_contract import levels
from everstep_contract.log import Claim, Entry
from everstep_contract.wire import Standing

Place = tuple[int, int]
"""(slot, attempt)"""
Yielded = tuple[int, int, int]
"""(slot, attempt, epoch)"""
History = tuple[int, ...]
"""The epoch in which each step was applied: the history by which a state was trained."""

_VALUES: list[Any] = [None]
_NUMBERS: dict[Any, int] = {None: 0}


def keep(value: Any) -> int:
    """A number that stands for a value; equal values have the same number. Worlds consist of such
    numbers, because they are compared and hashed millions of times.
    """
    number = _NUMBERS.setdefault(value, len(_VALUES))
    if number == len(_VALUES):
        _VALUES.append(value)
    return number


def kept(number: int) -> Any:
    return _VALUES[number]


@lru_cache(maxsize=1 << 16)
def list_entries(log: tuple[int, ...]) -> tuple[Entry, ...]:
    """The log's entries, without the places that a variant has deleted."""
    return tuple(_VALUES[n] for n in log if n)


@lru_cache(maxsize=1 << 16)
def oldest_living(log: tuple[int, ...], spare_named: bool) -> int:
    """What a coordinator publishes as `Levels.claimed`."""
    claims = [e for e in list_entries(log) if isinstance(e, Claim)]
    if spare_named:
        return runlog_rules.oldest_living(claims)
    return max((c.epoch for c in claims), default=0)


NONE, IN, HELD, PARKED, DEAD, OVER = "none", "in", "held", "parked", "dead", "over"
LIVING = (IN, HELD, PARKED)
STATES = {IN: State.TRACKED, HELD: State.HELD, PARKED: State.PARKED}


class Snap(NamedTuple):
    """What a pod reports."""

    slot: int
    attempt: int
    incarnation: int = 1
    life: int = 0
    """Life of the worker that is in an epoch, or was last in one."""
    work: str = NONE
    epoch: int = 0
    step: int = 0
    joined: int = 0
    promised: str = ""
    """Token of the epoch that it has joined in place; empty: it has joined a round."""
    cut: int = 0
    ready: int = 0
    """The epoch that its fresh worker has got ready to join in place; 0: none."""
    taken: int = -1
    """The step whose state that worker has taken; -1: none."""
    held: int = 0
    """The level of its living worker's epoch, while the coordinator does not know of that epoch."""

    @property
    def place(self) -> Place:
        return self[0], self[1]

    @property
    def free(self) -> bool:
        """Whether its worker has left its group and a fresh one waits."""
        return self.work not in LIVING and not self.ready


class Pod(NamedTuple):
    snap: Snap
    up: bool = True
    history: History = ()
    taken: History = ()
    """The history of the state that its fresh worker has taken."""
    kept: int = 0
    """The level of the newest epoch that it has heard of."""
    own: int = 0
    """The level of its living worker's epoch, if it has heard of a newer one."""
    follows: Place | None = None

    @property
    def level(self) -> EpochLevel | None:
        found: EpochLevel | None = _VALUES[self.kept]
        return found


class Coordinator(NamedTuple):
    place: Place
    read: int = 0
    """Number of log entries that it has read."""
    view: tuple[Snap, ...] = ()
    round: int = 0
    burnt: int = 0
    kept: int = 0
    """The level of its epoch."""
    saved: tuple[int, int, History, int | None] | None = None
    """(epoch, step, history, rank) of a save that is complete and not committed; `rank` is the one
    that saved the full state, or None.
    """
    unsaved: frozenset[tuple[int, int]] = frozenset()
    """(epoch, rank) whose save of the full state could not be committed."""
    words: int = 0
    """How many of the operator's messages it has heard."""
    owed: tuple[int, int] | None = None
    """(claim, level) that it has sent without knowing yet whether the claim is in the log."""
    stop: bool = False
    """It has heard that the job must save and stop."""
    leave: Place | None = None
    """The pod that must save and leave, as far as it has heard."""
    yields: frozenset[Yielded] = frozenset()
    """The pods that may be left out, as far as it has heard."""
    ended: str = ""
    """The job's end, as it publishes it."""

    @property
    def level(self) -> EpochLevel | None:
        found: EpochLevel | None = _VALUES[self.kept]
        return found

    @property
    def number(self) -> int:
        return level.number if (level := self.level) else 0


class World(NamedTuple):
    log: tuple[int, ...] = ()
    pods: tuple[Pod, ...] = ()
    """Sorted by place; a pod that is gone for good is no longer listed."""
    coordinators: tuple[Coordinator, ...] = ()
    slots: int = 2
    """How many slots train."""
    spares: int = 0
    words: tuple[Place, ...] = ()
    """Pods that the operator declared gone, in this order; each slot's next attempt follows at
    once.
    """
    links: frozenset[tuple[Place, Place]] = frozenset()
    """Pairs of pods that do not reach each other."""
    given_up: frozenset[Place] = frozenset()
    """Members that were out of reach for longer than a coordinator waits for what they hold."""
    faults: tuple[str, ...] = ()
    """Faults that are still to strike."""
    paused: Place | None = None
    """The pod whose agent and worker stand still (SIGSTOP), with all that they knew."""
    away: bool = False
    """The store does not answer."""
    stop: bool = False
    """The operator wants the job saved and stopped."""
    leave: Place | None = None
    """The operator wants this pod to save and leave."""
    yields: frozenset[Yielded] = frozenset()
    """The pods that may be left out, with the operator's permission."""
    late: tuple[Place, Snap] | None = None
    """(coordinator, report): a repeated report that is still on its way."""

    def entries(self, count: int | None = None) -> tuple[Entry, ...]:
        return list_entries(self.log[:count])

    def pod(self, place: Place) -> Pod | None:
        for pod in self.pods:
            if pod.snap[:2] == place:
                return pod
        return None

    def linked(self, a: Place, b: Place) -> bool:
        if self.paused is not None and a != b and self.paused in (a, b):
            return False
        return not self.links or ((a, b) if a < b else (b, a)) not in self.links

    def with_pod(self, pod: Pod) -> "World":
        place = pod.snap[:2]
        pods = [p for p in self.pods if p.snap[:2] != place]
        if pod.up:
            pods.append(pod)
            pods.sort(key=_slot_and_attempt)
        return self._replace(pods=tuple(pods))

    def coordinator(self, place: Place) -> Coordinator | None:
        for one in self.coordinators:
            if one.place == place:
                return one
        return None

    def with_coordinator(self, one: Coordinator) -> "World":
        found = [c for c in self.coordinators if c.place != one.place]
        found.append(one)
        found.sort(key=lambda c: c.place)
        return self._replace(coordinators=tuple(found))

    def without_coordinator(self, place: Place) -> "World":
        return self._replace(coordinators=tuple(c for c in self.coordinators if c.place != place))

    def current(self, slot: int) -> int:
        """The attempt of this slot that the operator wants."""
        return 1 + sum(1 for s, _ in self.words if s == slot)


def _slot_and_attempt(pod: Pod) -> Place:
    return pod.snap.place


@lru_cache(maxsize=1 << 16)
def build_report(snap: Snap) -> AgentReport:
    """The report that `pod.build_report` would make."""
    standing = Standing(epoch=snap.epoch, applied=snap.step, reductions=snap.step, vector="sums")
    worker = WorkerReport(
        local=0,
        life=snap.life,
        pid=1,
        state=STATES.get(snap.work, State.DEAD),
        standing=standing if snap.work == HELD else None,
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
        joined_token=snap.promised,
        cut=snap.cut,
        epoch=snap.epoch,
        workers=(worker,) if snap.life else (),
        fresh=(snap.life + 1,) if snap.free else (),
        ended=(Ended(local=0, life=snap.life - 1 if snap.work in LIVING else snap.life),)
        if snap.life
        else (),
        prepared=(snap.life + 1,) if snap.ready else (),
        taken=snap.taken if snap.taken >= 0 else None,
        held=kept(snap.held),
        in_place=True,
    )


Orders = tuple[tuple[Place, ...], int, int, Place | None, frozenset[Yielded]]
"""What the operator wants, as a value that can be hashed: the arguments of `build_wanted`."""


@lru_cache(maxsize=1 << 12)
def build_wanted(
    words: tuple[Place, ...],
    slots: int,
    least: int,
    leave: Place | None = None,
    yields: frozenset[Yielded] = frozenset(),
) -> levels.Wanted:
    attempts = [1 + sum(1 for s, _ in words if s == slot) for slot in range(slots)]
    return levels.Wanted(
        min_workers=least,
        want_workers=slots,
        max_workers=slots,
        peers=tuple(
            levels.Peer(slot=s, attempt=a, address=f"{s}-{a}") for s, a in enumerate(attempts)
        ),
        leave=() if leave is None or leave in words else (leave[0],),
        gone=tuple(levels.SlotAttempt(slot=s, attempt=a) for s, a in sorted(words)),
        yields=tuple(levels.Yield(slot=s, attempt=a, epoch=e) for s, a, e in sorted(yields)),
    )


def is_over(level: EpochLevel | None) -> bool:
    return level is None or level.stage is Stage.OVER

"""The two documents that operator and job exchange: levels, never commands.

The operator POSTs `Wanted` to any ready agent and gets `Seen` back; neither remembers what was said before.
Ages are durations measured by the sender's monotonic clock: nobody's wall clock is believed by another host.
"""

import enum
from dataclasses import dataclass, field

from everstep_contract import PROTOCOL

IN_ORDER = frozenset({"Leave", "Grow", "Shrink"})
"""Causes of incidents that are nobody's loss."""


class Stop(enum.Enum):
    NONE = "none"
    SUSPEND = "suspend"
    FINISH = "finish"


class Scope(enum.Enum):
    """What a worker is busy with; each has its own time limit."""

    STARTUP = "startup"
    STEP = "step"
    EVALUATE = "evaluate"
    PAUSE = "pause"


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    slot: int
    attempt: int
    address: str
    """host:port of the pod's agent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotAttempt:
    slot: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadAgent:
    """A container that its kubelet (on a laptop: the launcher) reports terminated: proof of death."""

    slot: int
    attempt: int
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Operator to job."""

    protocol: int = PROTOCOL
    generation: int = 0
    revision: int = 0
    """Grows with every change that one operator makes; an older document than the one held is ignored."""
    min_workers: int = 1
    want_workers: int = 1
    max_workers: int = 1
    peers: tuple[Peer, ...] = ()
    leave: tuple[int, ...] = ()
    leave_reason: str = ""
    hold: tuple[int, ...] = ()
    """Slots that no new epoch may take in for now: their node is under suspicion, and the proof is still to come.
    Unlike `leave` it asks for nothing, and a slot that is no longer named here may join again."""
    dead: tuple[DeadAgent, ...] = ()
    gone: tuple[SlotAttempt, ...] = ()
    stop: Stop = Stop.NONE
    save_every_steps: int | None = None
    """Counts from the next epoch on, for all its members alike; None: as their pods were made."""
    save_every_seconds: int | None = None
    """Counts at once; None: as the pods were made."""
    incident: str = ""
    """Identity of the incident that `leave` or `gone` belong to; it runs through every log line and phase."""
    hazard_per_hour: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One life of a worker, as the operator sees it."""

    slot: int
    attempt: int
    incarnation: int
    rank: int
    life: int
    step: int = 0
    """Last step applied."""
    scope: Scope = Scope.STARTUP


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRef:
    epoch: int
    step: int
    bytes: int = 0
    age_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """A slot that has left: its state is safe in the named checkpoint, its pod may be deleted."""

    slot: int
    attempt: int
    epoch: int
    step: int
    asked: bool = False
    """The operator had asked it to; else its pod was told to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    epoch: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The job's own word that it cannot go on (`cause` is an `everstep_contract.report.Cause`)."""

    cause: str
    message: str
    rank: int | None = None
    step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    name: str
    ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeIncident:
    """One interruption as the job lived it; the operator adds its own phases and keeps the last ten."""

    id: str
    cause: str
    """WorkerDied, WorkerHung, Leave, AgentLost, …"""
    message: str
    rung: str = ""
    """Which rung of the recovery ladder ended it: move, restart, …"""
    slot: int | None = None
    """The first slot that was lost; None: by whom the group was broken is not known yet."""
    slots: tuple[int, ...] = ()
    """All that were lost, `slot` first."""
    rank: int | None = None
    step: int = 0
    """Step the job resumes from (the last step that counts)."""
    steps_lost: int = 0
    phases: tuple[Phase, ...] = ()
    open: bool = True

    def concerns(self, slot: int) -> bool:
        """Whether what happens to this slot meanwhile is part of it."""
        if self.slot is None and not self.slots:
            return self.cause not in IN_ORDER
        return slot == self.slot or slot in self.slots


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageError:
    kind: str
    """AccessDenied, BucketMissing, Unreachable, NoAtomicCreate, …"""
    message: str
    """Without secrets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Job to operator."""

    protocol: int = PROTOCOL
    run: str = ""
    epoch: int = 0
    running: bool = False
    """The epoch has started and its members step."""
    coordinator: SlotAttempt | None = None
    members: tuple[Member, ...] = ()
    step: int = 0
    """Furthest step that every member applied."""
    until: int | None = None
    loss: float | None = None
    staged: CheckpointRef | None = None
    committed: CheckpointRef | None = None
    good: CheckpointRef | None = None
    left: tuple[Left, ...] = ()
    stopped: Stopped | None = None
    done: bool = False
    failure: Failure | None = None
    fenced: str = ""
    """Not empty: a newer claim names none of us; the text names the other job."""
    restarts: dict[str, int] = field(default_factory=dict)
    """Group restarts by cause, counted along the run log."""
    notes: tuple[str, ...] = ()
    """Guard notes and other findings that stopped nothing, newest last, at most five."""
    incidents: tuple[RuntimeIncident, ...] = ()
    storage_error: StorageError | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    """The time ledger, summed over ranks: step, wait, stall, detect, regroup, restore, startup, idle."""
    age_ms: int = 0
    """How old the figures are where they were measured."""

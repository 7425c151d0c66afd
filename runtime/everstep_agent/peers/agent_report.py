"""What each agent reports of its pod and its workers: a level of its own, never a command."""

import enum
from dataclasses import dataclass, field

from everstep_agent.peers.epoch_level import EpochLevel, Id
from everstep_agent.peers.read_back import ReadReport
from everstep_contract import levels, wire
from everstep_contract.sums import Sums

LONG_WAIT = 0.5
"""A rank that has waited for this much of the time limit that it has learnt waits for long."""


class State(enum.Enum):
    """A worker's state as its agent sees it."""

    SPAWNED = "spawned"
    READY = "ready"
    """Sent Hello, waits for Start: it can be a member of the next epoch."""
    STARTED = "started"
    TRACKED = "tracked"
    HELD = "held"
    """Out of its process group, in the middle of its step: it waits for the next epoch."""
    PARKED = "parked"
    FINISHED = "finished"
    FAILED = "failed"
    DEAD = "dead"


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureReport:
    cause: str
    """An `everstep_contract.report.Cause`."""
    message: str
    step: int = 0
    traceback: str = ""
    fault: str = ""
    """Distinguishes two failures of the same cause: an exception's type and place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    local: int
    life: int
    pid: int
    state: State
    applied: int = 0
    phase: int = 0
    """An `everstep_contract.position.Phase`."""
    scope: levels.Scope = levels.Scope.STARTUP
    waiting: bool = False
    sound: bool = False
    """Parked with a state that can be saved as of `applied`."""
    whole: int = 0
    """Newest step of which it has staged its part of its unit's full state."""
    unsaved: bool = False
    """It was asked to save the full state, and what it staged was unusable."""
    why: str = ""
    """Why it is parked, or how it ended."""
    hung: bool = False
    stuck: str = ""
    """How it survives SIGKILL: it will never step or save again, and is not proven dead."""
    cause: str = ""
    """An `everstep_contract.report.Cause`: what it died of."""
    fault: str = ""
    """Distinguishes two deaths of the same cause: a signal's name, or as in `FailureReport`."""
    failed: FailureReport | None = None
    standing: wire.Standing | None = None
    """What it told after `HOLD`."""
    dead_ms: int | None = None
    """Milliseconds since its death was noticed; for a hang, since the hang began."""
    overdue: float = 0.0
    """1: it has made no progress for the time limit that it has learnt; 2: for twice that."""
    stopped: bool = False
    """It makes no progress, and a signal has stopped its process."""
    waited: float = 0.0
    """1: it has waited for others for that time limit; 0: it does not wait, or has learnt none."""
    still_ms: int = 0
    """Milliseconds for which nothing has moved in the sum that it waits in."""
    still_limit_ms: int = 0
    """For how long that may be if all ranks wait in the sum, as it has learnt; 0: it has learnt nothing."""
    sums: Sums | None = None
    """Of a rank that waits, hangs, or makes no progress; None: it does not, or is in no reduction."""

    @property
    def waits_long(self) -> bool:
        return self.waited >= LONG_WAIT

    @property
    def stands_still(self) -> bool:
        return self.has_stood_still(1)

    def has_stood_still(self, factor: float) -> bool:
        """Nothing has moved in its sum for so many of the limits that it has learnt."""
        return 0 < self.still_limit_ms * factor <= self.still_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Every process of this local rank up to number `life` has ended: proof, from their parent
    process.
    """

    local: int
    life: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenCheckpoint:
    manifest: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UnsentSave:
    """A staged save that this agent can upload, or has uploaded, and that may not be committed."""

    epoch: int
    step: int
    rank: int
    whole: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentReport:
    slot: int
    attempt: int
    incarnation: int
    address: str
    joined: int = 0
    """Highest epoch number that this agent has joined."""
    joined_token: str = ""
    """Token of that epoch's claim; empty: it has joined a round, or its coordinator is older."""
    epoch: int = 0
    """Epoch of the workers below; 0: none is in an epoch."""
    workers: tuple[WorkerReport, ...] = ()
    fresh: tuple[int, ...] = ()
    """`life` of each worker that waits for Start, by local rank; 0: that rank is in an epoch. Empty
    unless all others are ready.
    """
    ended: tuple[Ended, ...] = ()
    prepared: tuple[int, ...] = ()
    """`life` of each worker that is ready to join the running epoch; as `fresh`."""
    taken: int | None = None
    """The step whose state all of these hold; None: none yet."""
    received: int = 0
    """Bytes of the state that these have received so far."""
    expected: int = 0
    """All that they are going to receive; 0: not known yet."""
    in_place: bool = False
    """Its workers can go on in the same step when others are lost."""
    leaving: bool = False
    """The agent received SIGTERM: this pod ends within its grace period."""
    acked: int = 0
    """The armed boundary that all local workers will still reach."""
    passed: int = 0
    """Furthest step of a local worker if the boundary could not be acknowledged."""
    staged: int = 0
    """Newest step staged by every local worker in this epoch."""
    kept: tuple[int, ...] = ()
    """Steps of this epoch whose parts of all local workers are here, or uploaded and not committed."""
    copied: int = 0
    """Newest step of which this pod's part also lies in another pod's memory."""
    cut: int = 0
    """Newest epoch known to this agent as cut or over; if it has not started that epoch by then, it
    never will.
    """
    held: EpochLevel | None = None
    """The epoch of the living local workers, sent to a coordinator that does not know of it, or whose
    epoch continues it with them and is one that they cannot enter.
    """
    unsent: tuple[UnsentSave, ...] = ()
    """Before its first epoch: of its predecessor. Once its epoch is cut: of that epoch."""
    unsent_of: int = 0
    """The epoch of which `unsent` lists all that is here; 0: none yet."""
    former_epoch: int = 0
    former_step: int = 0
    """The position of the workers before this container's last restart."""
    until: int | None = None
    loss: float | None = None
    pins: dict[str, int] = field(default_factory=dict)
    """Name that the script wants a checkpoint pinned under → its step, until one of this or a later step is
    committed.
    """
    notes: tuple[str, ...] = ()
    dropped: int = 0
    """Lines of output that were dropped because nobody reads the agent's stdout or stderr."""
    state_bytes: int = 0
    read_back: ReadReport | None = None
    """None: an agent of a version that reads nothing back for others."""
    broken: BrokenCheckpoint | None = None
    storage_error: levels.StorageError | None = None
    stuck: str = ""
    """Why this pod cannot continue: one of its processes survives SIGKILL."""
    device_deaths: tuple[levels.DeviceDeath, ...] = ()
    """Deaths by a device for whose judgment this pod waits before it starts the next worker."""
    failure: FailureReport | None = None
    """What ends the job, found by the agent itself (a script that cannot be started, …)."""
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def id(self) -> Id:
        return self.slot, self.attempt, self.incarnation

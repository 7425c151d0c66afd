"""What each agent reports about its pod and its workers: a level of its own, never a command."""

import enum
from dataclasses import dataclass, field

from everstep_agent.peers.epoch_level import EpochLevel, Id
from everstep_agent.peers.read_back import ReadReport
from everstep_contract import levels, wire
from everstep_contract.sums import Sums

LONG_WAIT = 0.5
"""A rank waits for long once it has waited for this share of the limit that it has learnt."""


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
    """Why it is parked, why it could not form the group of its epoch, or how it ended."""
    hung: bool = False
    missed: str = ""
    """Which sum it held up when the coordinator had it ended, in words; empty: not known."""
    stuck: str = ""
    """How it survives SIGKILL: it will never step or save again, and is not proven dead."""
    cause: str = ""
    """An `everstep_contract.report.Cause`: what it died of."""
    fault: str = ""
    """Distinguishes two deaths of the same cause: a signal's name, or as in `FailureReport`."""
    failed: FailureReport | None = None
    standing: wire.Standing | None = None
    """What it reported after `HOLD`."""
    dead_ms: int | None = None
    """Milliseconds since its death was noticed; for a hang, since the hang began."""
    overdue: float = 0.0
    """1: it has made no progress for the time limit that it has learnt; 2: for twice that."""
    stopped: bool = False
    """It makes no progress, and a signal has stopped its process."""
    stopped_long: bool = False
    """The same, for so long that it is no short pause."""
    waited: float = 0.0
    """1: it has waited for others for that limit; 0: it does not wait, or has learnt no limit."""
    slowed: float = 0.0
    """1: since it last waited for others, it went without progress for the time limit that it has
    learnt; 2: for twice that.
    """
    still_ms: int = 0
    """Milliseconds for which nothing has moved in the sum that it waits in."""
    still_limit_ms: int = 0
    """The learnt limit for `still_ms` if all ranks wait in the sum; 0: it has learnt none."""
    feeds: dict[str, str] = field(default_factory=dict)
    """The feeds that its script has made: name → settings in words. Empty: not known."""
    sums: Sums | None = None
    """None: it does not wait, hang, or fail to make progress; or it is in no reduction."""

    @property
    def waits_long(self) -> bool:
        return self.waited >= LONG_WAIT

    @property
    def stands_still(self) -> bool:
        return self.has_stood_still(1)

    def has_stood_still(self, factor: float) -> bool:
        """Whether nothing has moved in its sum for `factor` times the limit that it has learnt."""
        return 0 < self.still_limit_ms * factor <= self.still_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Proof, from their parent process, that every process of this local rank up to number `life`
    has ended.
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
    unless the workers of all other ranks are ready.
    """
    ended: tuple[Ended, ...] = ()
    prepared: tuple[int, ...] = ()
    """`life` of each worker that is ready to join the running epoch; as `fresh`."""
    taken: int | None = None
    """The step whose state all of these hold; None: none yet."""
    received: int = 0
    """Bytes of the state that these have received so far."""
    expected: int = 0
    """Bytes of the state that they will receive in all; 0: not known yet."""
    in_place: bool = False
    """Its workers can continue in the same step when others are lost."""
    fixed: str = ""
    """As in `wire.Tracked`, of one of its workers."""
    leaving: bool = False
    """The agent received SIGTERM: this pod ends within its grace period."""
    notice: float | None = None
    """Seconds left of its notice, until this agent ends, whatever it waits for; None: no SIGTERM."""
    acked: int = 0
    """The armed boundary that all local workers will still reach."""
    passed: int = 0
    """Furthest step of a local worker if the boundary could not be acknowledged."""
    staged: int = 0
    """Newest step staged by every local worker in this epoch."""
    kept: tuple[int, ...] = ()
    """Steps of this epoch for which the parts of all local workers are here, or are uploaded and
    not committed.
    """
    copied: int = 0
    """Newest step of which this pod's part is also in another pod's memory."""
    cut: int = 0
    """Newest epoch known to this agent as cut or over; if it has not started that epoch by then, it
    never will.
    """
    held: EpochLevel | None = None
    """The epoch of the living local workers. Only sent to a coordinator that does not know this
    epoch, or whose own epoch continues it with these workers, although they cannot enter.
    """
    unsent: tuple[UnsentSave, ...] = ()
    """Before the agent's first epoch: saves of its predecessor. Once its epoch is cut: saves of
    that epoch.
    """
    unsent_of: int = 0
    """The epoch of which `unsent` lists every save that is here; 0: none yet."""
    former_epoch: int = 0
    former_step: int = 0
    """The position of the workers before this container's last restart."""
    until: int | None = None
    loss: float | None = None
    pins: dict[str, int] = field(default_factory=dict)
    """Name under which the script wants a checkpoint pinned → its step. Listed until a checkpoint
    of this or a later step is committed.
    """
    notes: tuple[str, ...] = ()
    """What every rank notes in the same words."""
    own_notes: tuple[str, ...] = ()
    """What this pod's ranks alone note."""
    not_joined: str = ""
    """Why a local rank is in no epoch although the job has a place for it; empty: none, or it is on
    its way.
    """
    dropped: int = 0
    """Lines of output that were dropped because nobody reads the agent's stdout or stderr."""
    uploading: bool = False
    """It uploads saves, or will."""
    state_bytes: int = 0
    read_back: ReadReport | None = None
    """None: the agent's version reads nothing back for others."""
    broken: BrokenCheckpoint | None = None
    storage_error: levels.StorageError | None = None
    stuck: str = ""
    """Why this pod cannot continue: one of its processes survives SIGKILL."""
    device_deaths: tuple[levels.DeviceDeath, ...] = ()
    """Deaths from device faults. Before it starts the next worker, this pod waits until the
    operator has judged them.
    """
    failure: FailureReport | None = None
    """A failure that ends the job, found by the agent itself (the script cannot be started, …)."""
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def id(self) -> Id:
        return self.slot, self.attempt, self.incarnation

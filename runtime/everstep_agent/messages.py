"""What agents say to each other: each agent reports its own level, the coordinator publishes its
levels.

Nothing here is a command: a document that is lost, doubled or late says the same as the next one.
"""

import enum
from dataclasses import dataclass, field

from everstep_contract import levels, log


class State(enum.Enum):
    """A worker's life as its agent sees it."""

    SPAWNED = "spawned"
    READY = "ready"
    """Said Hello, waits for Start: it can be a member of the next epoch."""
    STARTED = "started"
    TRACKED = "tracked"
    PARKED = "parked"
    FINISHED = "finished"
    FAILED = "failed"
    DEAD = "dead"


class Stage(enum.Enum):
    """What the coordinator says about its epoch."""

    STARTING = "starting"
    RUNNING = "running"
    CUT = "cut"
    """Over for the group: come out, park, wait for the post-mortem save."""
    OVER = "over"
    """The workers of this epoch end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureReport:
    cause: str
    """An `everstep_contract.report.Cause`."""
    message: str
    step: int = 0
    traceback: str = ""


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
    unsaved: bool = False
    """It was asked to save the whole, and what it staged was of no use."""
    why: str = ""
    """Why it is parked, or how it ended."""
    hung: bool = False
    failed: FailureReport | None = None
    dead_ms: int | None = None
    """How long ago its death was noticed; of a hang, how long ago that began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Every life of this local rank up to `life` is over: proof, from the parent of the process."""

    local: int
    life: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenCheckpoint:
    manifest: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentReport:
    slot: int
    attempt: int
    incarnation: int
    address: str
    joined: int = 0
    """Highest epoch number that this agent has joined."""
    epoch: int = 0
    """Epoch of the workers below; 0: none is in an epoch."""
    workers: tuple[WorkerReport, ...] = ()
    fresh: tuple[int, ...] = ()
    """Lives of the workers that wait for Start, by local rank; empty unless all are ready."""
    ended: tuple[Ended, ...] = ()
    leaving: bool = False
    """SIGTERM came: this pod goes within its grace period."""
    acked: int = 0
    """The armed boundary that all local workers will still meet."""
    passed: int = 0
    """Furthest step of a local worker when it could not be acknowledged."""
    staged: int = 0
    """Newest step staged by every local worker in this epoch."""
    cut: int = 0
    """Newest epoch of which it has heard that it is cut or over: what it did not begin by then, it never
    will.
    """
    held: "EpochLevel | None" = None
    """The epoch of our living workers, told to a coordinator that has not heard of it."""
    former_epoch: int = 0
    former_step: int = 0
    """Where the workers of this container's last life stood when it ended."""
    until: int | None = None
    loss: float | None = None
    notes: tuple[str, ...] = ()
    state_bytes: int = 0
    broken: BrokenCheckpoint | None = None
    storage_error: levels.StorageError | None = None
    failure: FailureReport | None = None
    """What ends the job, found by the agent itself (a script that cannot be started, …)."""
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def id(self) -> tuple[int, int, int]:
        return self.slot, self.attempt, self.incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochMember:
    """One pod's part of an epoch; its ranks are `node_rank * workers + local`."""

    slot: int
    attempt: int
    incarnation: int
    node_rank: int
    lives: tuple[int, ...]
    address: str

    @property
    def id(self) -> tuple[int, int, int]:
        return self.slot, self.attempt, self.incarnation

    def ids(self) -> tuple[log.MemberId, ...]:
        return tuple(
            log.MemberId(
                slot=self.slot,
                attempt=self.attempt,
                incarnation=self.incarnation,
                rank=local,
                life=life,
            )
            for local, life in enumerate(self.lives)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """An armed boundary; `confirmed` once every agent has acknowledged it."""

    step: int
    stay: bool = False
    confirmed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Saver:
    """The rank that saves the whole state after a cut."""

    rank: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochLevel:
    number: int
    token: str
    stage: Stage
    members: tuple[EpochMember, ...]
    commit: log.Commit | None = None
    """The checkpoint to go on from; None: from step 0."""
    boundary: Boundary | None = None
    saver: Saver | None = None
    committed: int = 0
    """Newest step committed on this epoch's lineage."""
    save_every_steps: int | None = None
    """The same for all members, whenever their pods were made; None: as each was told."""
    cause: str = ""
    """Why it ended, once it is cut or over."""
    incident: str = ""

    def member(self, slot: int, attempt: int, incarnation: int) -> EpochMember | None:
        ident = (slot, attempt, incarnation)
        return next((m for m in self.members if m.id == ident), None)

    @property
    def resume(self) -> int:
        return self.commit.step if self.commit else 0

    @property
    def world(self) -> int:
        return sum(len(m.lives) for m in self.members)

    @property
    def live(self) -> bool:
        return self.stage in (Stage.STARTING, Stage.RUNNING)


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The job is over for every agent: each writes this as its exit report."""

    cause: str
    message: str
    rank: int | None = None
    epoch: int = 0
    step: int = 0
    traceback: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    version: int = 0
    coordinator: levels.SlotAttempt
    address: str
    round: int = 0
    """Number of the epoch that is being gathered; who is free joins it. 0: none."""
    claimed: int = 0
    """Epoch of the newest claim in the run log: what an older one left running is over."""
    epoch: EpochLevel | None = None
    wanted: levels.Wanted = field(default_factory=levels.Wanted)
    seen: levels.Seen = field(default_factory=levels.Seen)
    end: End | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class After:
    """Long-poll: answer when the levels are newer than `version`."""

    version: int = 0
    reader: str = ""
    """Address of who asks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """Answer to a report; not acting: ask somebody else."""

    acting: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Who:
    """What an agent knows about the coordinator."""

    slot: int
    attempt: int
    acting: bool = False
    epoch: int = 0
    """Newest epoch that this agent was a member of."""
    coordinator: str = ""
    """Address of the coordinator that it follows; empty: none."""
    candidate: bool = True
    """False: it is leaving and will not coordinate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreCall:
    """A worker's request to the group's store, passed on by its agent; `frame` is a wire frame in
    base64.
    """

    epoch: int
    frame: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAnswer:
    value: str | None = None
    number: int = 0
    error: str = ""
    pending: bool = False
    """A held get came to its time limit here: ask again."""

"""The documents between agents: each agent reports its own level, the coordinator publishes its
levels.

None of them is a command: one that is lost, duplicated or late has the same content as the next
one.
"""

import enum
from dataclasses import dataclass, field

from everstep_agent.peers.read_back import ReadBack, ReadReport
from everstep_contract import levels, log, wire
from everstep_contract.ledger import LedgerEntry
from everstep_contract.ranges import Ranges
from everstep_contract.sums import Sums
from everstep_contract.units import ONE_RANK, Mesh

LONG_WAIT = 0.5
"""A rank that has waited for this much of the time limit that it has learnt waits for long."""
Id = tuple[int, int, int]
"""(slot, attempt, incarnation) of an agent"""


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


class Stage(enum.Enum):
    """The coordinator's stage of its epoch."""

    STARTING = "starting"
    RUNNING = "running"
    HOLD = "hold"
    """The process group is closed; the workers keep their step, tell their standing, and wait for an
    epoch that continues this one in place, or for `CUT`.
    """
    CUT = "cut"
    """The process group is closed: leave the collective, park, wait for the post-mortem save."""
    OVER = "over"
    """The workers of this epoch end."""


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
    held: "EpochLevel | None" = None
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


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochMember:
    """One pod's part of an epoch."""

    slot: int
    attempt: int
    incarnation: int
    node_rank: int
    """Its place among the pods of the epoch."""
    first: int
    """The lowest of its ranks."""
    lives: tuple[int, ...]
    """By local rank; 0: that one was lost, and its next worker is not in the epoch."""
    address: str

    @property
    def id(self) -> Id:
        return self.slot, self.attempt, self.incarnation

    @property
    def ranks(self) -> dict[int, int]:
        """Local rank → rank, of those in the epoch."""
        inside = (local for local, life in enumerate(self.lives) if life)
        return {local: self.first + number for number, local in enumerate(inside)}

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
            if life
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """An armed boundary; `confirmed` once every agent has acknowledged it."""

    step: int
    stay: bool = False
    hold: bool = False
    """Newcomers join there: the members hold until they have the state."""
    near: bool = False
    """The save there is a near one."""
    confirmed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Saver:
    """The unit that saves the full state after a cut: each of its ranks its own part."""

    rank: int
    """The unit's first."""
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InPlace:
    """How an epoch continues a former one in the middle of a step; fields as in `wire.Regroup`."""

    former: int
    """Number of the epoch whose survivors its members are."""
    applied: int
    reductions: int
    micro_batches: int = 0
    shares: tuple[Ranges, ...] = ()
    """By rank of this epoch; empty: no member has begun the next reduction."""
    behind: tuple[int, ...] = ()
    """Ranks of this epoch that need `vector`."""
    vector: str = ""
    passes: tuple[int, ...] = ()
    """By unit of this epoch; empty: its units are single ranks, or no member has begun."""
    begun: "tuple[BegunBefore, ...]" = ()
    """For ranks that have not begun, while others have that compute the same micro-batches."""

    def find_begun(self, rank: int) -> "BegunBefore | None":
        return next((b for b in self.begun if b.rank == rank), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class BegunBefore:
    """What those began with that compute the same micro-batches as a rank of this epoch."""

    rank: int
    share: Ranges
    passes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A member hands its state to a worker of a pod that joins."""

    giver: int
    """Rank in the running epoch."""
    slot: int
    local: int
    key: str
    """Prefix of the keys by which the two find each other; no other transfer has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hung:
    """A worker that its agent shall end if it still makes no progress: all others wait for it."""

    slot: int
    local: int
    life: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochLevel:
    number: int
    token: str
    stage: Stage
    members: tuple[EpochMember, ...]
    mesh: Mesh = ONE_RANK
    """How its ranks form units."""
    commit: log.Commit | None = None
    """The checkpoint to continue from; None: step 0."""
    boundary: Boundary | None = None
    in_place: InPlace | None = None
    """None: its members are new processes, which restore `commit`."""
    joining: tuple[EpochMember, ...] = ()
    """Workers that are invited to join this running epoch: other pods, and those that take the place
    of a member's lost ranks.
    """
    transfers: tuple["Transfer", ...] = ()
    asked: int | None = None
    """The rank that has to give its vector (stage HOLD)."""
    successor: int = 0
    """Number of the epoch that shall continue this one in place, while its members are asked how far
    they are: who answers has joined it, and enters no epoch of a lower number. 0: none.
    """
    successor_token: str = ""
    """Token of that epoch's claim: another coordinator may ask for the same number."""
    unclaimed: tuple[log.Claim, ...] = ()
    """Claims that are not known to be in the log, oldest first: of epochs that this one continues, and
    its own. Its members step; nothing of it is committed before its claim. Empty: it is claimed.
    """
    leaving: tuple[Id, ...] = ()
    """Ids of members that leave: their workers end now, and the others go on in place."""
    ended: tuple[int, ...] = ()
    """Ranks that live and whose unit has lost a rank: their agents end them, because a unit goes on whole or not at
    all (stage HOLD), or because they can save nothing (stage CUT).
    """
    saver: Saver | None = None
    committed: int = 0
    """Newest step committed on this epoch's lineage."""
    kept: int = 0
    """The newest step of which all members hold their parts: older near saves are dropped. Of an epoch whose save is
    finished: its step.
    """
    save_every_steps: int | None = None
    """The same for all members, whenever their pods were created; None: each uses its own
    environment.
    """
    guard_factor: float | None = None
    guard_action: str | None = None
    generation: int = 0
    """Generation of the job's spec that these settings are taken from."""
    cause: str = ""
    """Why it ended, once it is cut or over."""
    incident: str = ""
    store: str = ""
    """Address of the agent that keeps the keys of the epoch's process group."""
    hung: tuple[Hung, ...] = ()

    def member(self, slot: int, attempt: int, incarnation: int) -> EpochMember | None:
        ident = (slot, attempt, incarnation)
        return next((m for m in self.members if m.id == ident), None)

    def place_after(self, former: int, id: Id) -> EpochMember | None:
        """The place of this pod, if it goes on in place from epoch `former`."""
        continues = self.in_place is not None and self.in_place.former == former
        return self.member(*id) if continues else None

    @property
    def resume(self) -> int:
        """The step that was applied last when it began."""
        if self.in_place is not None:
            return self.in_place.applied
        return self.commit.step if self.commit else 0

    @property
    def claimed(self) -> int:
        """Number of the newest epoch in its line whose claim is known to be in the log."""
        return self.unclaimed[0].chain[-1].epoch if self.unclaimed else self.number

    def follows(self, claim: log.Claim) -> bool:
        """Whether the claim is its own, or one that its claims outside the log come after."""
        own = self.token == claim.token or claim in self.unclaimed
        return own or (bool(self.unclaimed) and self.claimed == claim.epoch)

    @property
    def world(self) -> int:
        return sum(len(m.ranks) for m in self.members)

    @property
    def savers(self) -> range:
        """The ranks that save after a cut."""
        return range(0) if self.saver is None else self.mesh.list_unit_of(self.saver.rank)

    @property
    def slots_together(self) -> int:
        """Pods are members in multiples of this."""
        return max((self.mesh.count_slots(len(m.lives)) for m in self.members), default=1)

    @property
    def live(self) -> bool:
        return self.stage in (Stage.STARTING, Stage.RUNNING)


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The end of the job for every agent: each writes it as its exit report."""

    cause: str
    message: str
    rank: int | None = None
    epoch: int = 0
    step: int = 0
    traceback: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorFault:
    """Coordinator code raised an exception."""

    slot: int
    attempt: int
    """Attempt of the slot in which it ran."""
    message: str
    traceback: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    version: int = 0
    coordinator: levels.SlotAttempt
    address: str
    round: int = 0
    """Number of the epoch being gathered; free agents join it. 0: none."""
    claimed: int = 0
    """The oldest epoch whose workers may go on, by the run log: anything that an older one left running
    is over.
    """
    epoch: EpochLevel | None = None
    unfinished: EpochLevel | None = None
    """A former epoch: whoever came back with saves of it that were not uploaded uploads them under its token."""
    read_back: ReadBack | None = None
    """The checkpoint that is read back now, and who reads what."""
    wanted: levels.Wanted = field(default_factory=levels.Wanted)
    seen: levels.Seen = field(default_factory=levels.Seen)
    end: End | None = None
    faults: tuple[CoordinatorFault, ...] = ()
    """Faults of the job's coordinators, oldest first, until one has run for long enough without."""
    laid_down: bool = False
    """The last document of a coordinator that has failed: its epoch goes on without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class After:
    """Long-poll: answer as soon as the levels are newer than `version`."""

    version: int = 0
    reader: str = ""
    """Address of the reader."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """Answer to a report or a part; if not `acting`, look for another coordinator."""

    acting: bool
    term: str = ""
    """Id of the coordinator's term: an agent that takes the role twice has two, and the second
    knows nothing of the first.
    """


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
class LedgerCall:
    """To the agent of a member: its ledger entries that no manifest covers yet, after this place."""

    step: int = 0
    reduction: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerAnswer:
    entries: tuple[LedgerEntry, ...] = ()
    more: bool = False
    """There are later ones: ask again, after the last of these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreCall:
    """A worker's request to the process group's store, forwarded by its agent; `frame` is a wire
    frame in base64.
    """

    epoch: int
    frame: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAnswer:
    value: str | None = None
    number: int = 0
    error: str = ""
    pending: bool = False
    """A held get reached its time limit: ask again."""

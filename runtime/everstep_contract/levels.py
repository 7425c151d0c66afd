"""The two documents that operator and job exchange: levels, never commands.

The operator POSTs `Wanted` to any ready agent and receives `Seen`; neither side depends on an
earlier exchange. Ages are durations measured by the sender's monotonic clock: no host relies on
another host's wall clock.
"""

import enum
import re
from dataclasses import dataclass, field

from everstep_contract import PROTOCOL

POD_NOTE = re.compile(r"slot [0-9]+: ")
"""How a note begins that describes a pod's present state: its output is not read, its rank cannot join. A note
about what has happened begins otherwise ("slot 1 leaves without …").
"""
IN_ORDER = frozenset({"Leave", "Grow", "Shrink", "Edit"})
"""Causes of planned incidents, in which nothing is lost."""


class Stop(enum.Enum):
    NONE = "none"
    SUSPEND = "suspend"
    FINISH = "finish"


class Scope(enum.Enum):
    """What a worker is doing; each scope has its own time limit."""

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
    node: str = ""
    """The node of the pod; empty: not known."""
    rack: str = ""
    """The value of the node's rack label; empty: it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotAttempt:
    slot: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadAgent:
    """A container that its kubelet (on a laptop: the launcher) reports as terminated: proof of
    death.
    """

    slot: int
    attempt: int
    incarnation: int
    reason: str = ""
    """Why it ended, in the kubelet's words, such as "OOMKilled, exit status 137". Empty: not known.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Yield:
    """A pod that the job may leave out although nothing proves its death, because its node and its
    agent are silent. This permission is valid only while the claim of `epoch` is the newest in the
    run log: if the pod is alive and its side has claimed a later epoch, the permission is void.
    """

    slot: int
    attempt: int
    epoch: int


class OnLoss(enum.Enum):
    """What the others do when a rank is lost."""

    SHRINK = "Shrink"
    """They continue without it until it is replaced."""
    WAIT = "Wait"
    """They wait for its replacement: the run equals an undisturbed one bit for bit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSettings:
    """Settings that may be edited while the job runs. None: as in the pods' environment (an older
    operator).
    """

    hang_seconds: float | None = None
    startup_seconds: float | None = None
    drain_seconds: float | None = None
    gang_seconds: float | None = None
    keep: int | None = None
    guard_factor: float | None = None
    """This and `guard_action` take effect with the next epoch, for all its members; all other
    settings take effect at once.
    """
    guard_action: str | None = None
    in_place: bool | None = None
    on_loss: str | None = None
    """An `OnLoss`."""
    below_min_seconds: float | None = None
    max_redo_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """From the operator to the job."""

    protocol: int = PROTOCOL
    generation: int = 0
    revision: int = 0
    """Increases with every change that one operator makes. A document with a lower revision than
    the current one is ignored.
    """
    min_workers: int = 1
    want_workers: int = 1
    max_workers: int = 1
    peers: tuple[Peer, ...] = ()
    leave: tuple[int, ...] = ()
    leave_reason: str = ""
    hold: tuple[int, ...] = ()
    """Slots that may not join a new epoch for now: their node is suspect and not yet judged. Unlike
    `leave`, it requests nothing, and a slot that is no longer named may join again.
    """
    dead: tuple[DeadAgent, ...] = ()
    gone: tuple[SlotAttempt, ...] = ()
    yields: tuple[Yield, ...] = ()
    watched: tuple[int, ...] = ()
    """Slots on nodes whose GPUs the operator watches; other slots do not wait for a judgment."""
    judged: tuple[str, ...] = ()
    """Ids from `Seen.device_deaths` for which the operator has judged a scrape of the node made
    after the death.
    """
    stop: Stop = Stop.NONE
    save_every_steps: int | None = None
    """Takes effect with the next epoch, for all its members; None: as in the pods' environment."""
    save_every_seconds: int | None = None
    """Takes effect at once; None: as in the pods' environment."""
    settings: JobSettings = field(default_factory=JobSettings)
    pin: str = ""
    """A checkpoint pinned under this name must exist; if the run has never had one, one is saved.
    Empty: no pin is wanted.
    """
    incident: str = ""
    """Id of the incident that `leave` or `gone` belong to; it is in every log line and phase."""
    hazard_per_hour: dict[int, float] = field(default_factory=dict)

    def find_node(self, slot: int, attempt: int) -> str:
        """The node of a pod; empty: not known."""
        nodes = (p.node for p in self.peers if (p.slot, p.attempt) == (slot, attempt))
        return next(nodes, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One worker process, as the operator sees it."""

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
class Pinned:
    """The checkpoint that was pinned under a name."""

    name: str
    epoch: int
    step: int
    manifest: str
    """Key relative to the run."""
    kept: bool = True
    """False: the name was given up later, so the checkpoint may be retired."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """A slot that has left: its state is in the named checkpoint, its pod may be deleted."""

    slot: int
    attempt: int
    epoch: int
    step: int
    asked: bool = False
    """The operator had asked it to leave; otherwise its pod received SIGTERM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    epoch: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The job's report that it cannot continue (`cause` is an `everstep_contract.report.Cause`)."""

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
    """One interruption as the job measured it; the operator adds its own phases and keeps the last
    ten.
    """

    id: str
    cause: str
    """WorkerDied, WorkerHung, Leave, AgentLost, …"""
    message: str
    rung: str = ""
    """How the job recovered: move, restart, …"""
    slot: int | None = None
    """The first slot that was lost; None: it is not known yet which one broke the group."""
    slots: tuple[int, ...] = ()
    """All lost slots, `slot` first."""
    rank: int | None = None
    step: int = 0
    """Step that the job resumes from (the last step that counts)."""
    steps_lost: int = 0
    phases: tuple[Phase, ...] = ()
    open: bool = True

    def concerns(self, slot: int) -> bool:
        """Whether this incident covers what happens to the slot in the meantime."""
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
class DeviceDeath:
    """A worker died because of its device, and the slot's next worker waits for the operator's
    judgment of that device.
    """

    id: str
    slot: int
    attempt: int
    message: str
    age_ms: int = 0
    """Since the agent noticed it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StuckPod:
    """A pod with a process that survives SIGKILL. The pod is not proven dead, so its slot needs a
    newer attempt.
    """

    slot: int
    attempt: int
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """From the job to the operator."""

    protocol: int = PROTOCOL
    run: str = ""
    generation: int = 0
    """Generation of the newest `Wanted` that is fully in effect, settings that wait for the next
    epoch included. 0: an older agent, which does not report it.
    """
    epoch: int = 0
    running: bool = False
    """The epoch has started and its members train."""
    in_place: bool = False
    """The epoch continues with workers of the previous one, in the same step."""
    coordinator: SlotAttempt | None = None
    members: tuple[Member, ...] = ()
    step: int = 0
    """Furthest step that every member applied."""
    until: int | None = None
    loss: float | None = None
    staged: CheckpointRef | None = None
    copied_step: int = 0
    """Newest step of which each pod's part is also in another pod's memory; 0: none, or no copies
    are made.
    """
    kept_step: int = 0
    """Newest step of this epoch that is kept in memory, for a loss that leaves no whole copy of the model; 0: none."""
    committed: CheckpointRef | None = None
    good: CheckpointRef | None = None
    pinned: Pinned | None = None
    """The checkpoint of `Wanted.pin`, once it is in the run log."""
    refused: str = ""
    """Why the newest save was not committed, though the store works; empty once a later one is."""
    silent: tuple[SlotAttempt, ...] = ()
    """Members of the running epoch from which nothing has been heard for a while."""
    yielded: tuple[Yield, ...] = ()
    """Those of `Wanted.yields` that the newest claim leaves out: their slots may have a newer attempt."""
    spares: tuple[SlotAttempt, ...] = ()
    """Pods in no epoch that could join the running one at once."""
    left: tuple[Left, ...] = ()
    device_deaths: tuple[DeviceDeath, ...] = ()
    """Deaths for which an agent still waits for the operator's judgment."""
    stuck: tuple[StuckPod, ...] = ()
    stopped: Stopped | None = None
    done: bool = False
    failure: Failure | None = None
    fenced: str = ""
    """Not empty: a newer claim names no member of this job's gang; the text names the other job."""
    restarts: dict[str, int] = field(default_factory=dict)
    """Group restarts by cause, counted along the run log."""
    notes: tuple[str, ...] = ()
    """Guard notes and other findings that stopped nothing, newest last, at most five. What matches `POD_NOTE` is so
    now; the others are about what has happened.
    """
    incidents: tuple[RuntimeIncident, ...] = ()
    storage_error: StorageError | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    """The time ledger, summed over ranks: step, data, wait, stall, detect, regroup, restore, startup, evaluate,
    pause, idle.
    """
    age_ms: int = 0
    """Age of the figures at their source."""

"""The documents between agents: the coordinator's levels, questions and answers. What an agent
reports about itself is in `agent_report`, an epoch is in `epoch_level`.

None of them is a command. If a document is lost, the next one has the same content, and one that is
duplicated or late does no harm.
"""

from dataclasses import dataclass, field

from everstep_agent.peers.epoch_level import EpochLevel
from everstep_agent.peers.read_back import ReadBack
from everstep_contract import levels
from everstep_contract.ledger import LedgerEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The end of the job. Every agent writes it as its exit report."""

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
    """The oldest epoch whose workers may continue, according to the run log. Workers that an older
    epoch left running must end.
    """
    epoch: EpochLevel | None = None
    unfinished: EpochLevel | None = None
    """A former epoch. Agents that hold saves of it that were not uploaded upload them under its
    token.
    """
    read_back: ReadBack | None = None
    """The checkpoint that is being read back, and which pod reads what."""
    wanted: levels.Wanted = field(default_factory=levels.Wanted)
    seen: levels.Seen = field(default_factory=levels.Seen)
    end: End | None = None
    faults: tuple[CoordinatorFault, ...] = ()
    """Faults of the job's coordinators, oldest first, until a coordinator has run for long enough
    without a fault.
    """
    laid_down: bool = False
    """This is the last document of a coordinator that has failed. Its epoch continues without a
    coordinator.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class After:
    """Long-poll: answer as soon as the levels are newer than `version`."""

    version: int = 0
    reader: str = ""
    """Address of the reader."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """Asks an agent whom it follows."""

    lost: tuple[str, ...] = ()
    """Addresses of coordinators that the asking agent has lost. Who follows one of them expects its
    answers sooner, even if its own ranks do not seem to wait.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """Answer to a report or a part. If it is not `acting`, look for another coordinator."""

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
    """Asks a member's agent for its ledger entries after this place that no manifest covers yet."""

    step: int = 0
    reduction: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerAnswer:
    entries: tuple[LedgerEntry, ...] = ()
    more: bool = False
    """There are later entries: ask again, from the last of these on."""


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
    values: tuple[str, ...] = ()
    number: int = 0
    error: str = ""
    pending: bool = False
    """The request was held up to its time limit: ask again."""

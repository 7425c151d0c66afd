"""An epoch as its coordinator publishes it: its members, how it continues the former epoch, and
what the members are asked to do.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from everstep_contract import log
from everstep_contract.ranges import Ranges
from everstep_contract.units import ONE_RANK, Mesh

Id = tuple[int, int, int]
"""(slot, attempt, incarnation) of an agent"""


class Stage(enum.Enum):
    """The coordinator's stage of its epoch."""

    STARTING = "starting"
    RUNNING = "running"
    HOLD = "hold"
    """The process group is closed. The workers keep their step, report their standing, and wait for
    an epoch that continues this one in place, or for `CUT`.
    """
    CUT = "cut"
    """The process group is closed: leave the collective, park, wait for the post-mortem save."""
    OVER = "over"
    """The workers of this epoch end."""


@dataclass(frozen=True, kw_only=True)
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
    """The lives of its workers, by local rank; 0: that rank was lost, and its next worker is not in
    the epoch.
    """
    address: str

    @cached_property
    def id(self) -> Id:
        return self.slot, self.attempt, self.incarnation

    @cached_property
    def ranks(self) -> Mapping[int, int]:
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
    """Newcomers join there: the members hold until the newcomers have the state."""
    near: bool = False
    """The save there is a near one."""
    confirmed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Saver:
    """The unit that saves the full state after a cut. Each of its ranks saves its own part."""

    rank: int
    """The unit's first rank."""
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BegunBefore:
    """What the ranks began with that compute the same micro-batches as `rank` of this epoch."""

    rank: int
    share: Ranges
    passes: int


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
    begun: tuple[BegunBefore, ...] = ()
    """For ranks that have not begun, although others that compute the same micro-batches have."""
    endpoints: tuple[str, ...] = ()
    """By rank of this epoch; empty: not all are known."""
    complete_buckets: int = 0

    def find_begun(self, rank: int) -> BegunBefore | None:
        return next((b for b in self.begun if b.rank == rank), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A member sends its state to a worker that joins."""

    giver: int
    """Rank in the running epoch."""
    slot: int
    local: int
    key: str
    """Prefix of the keys by which the two find each other; no other transfer has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hung:
    """A worker that its agent must end if it still makes no progress, because all others wait."""

    slot: int
    local: int
    life: int
    stopped: bool = field(default=False, compare=False)
    """A signal has stopped it, so it is not only slow."""
    missed: str = field(default="", compare=False)
    """Which sum it holds up, in words; empty: the others wait in none."""


@dataclass(frozen=True, kw_only=True)
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
    """Workers that are invited to join this running epoch: those of other pods, and those that take
    the place of a member's lost ranks.
    """
    transfers: tuple[Transfer, ...] = ()
    asked: int | None = None
    """The rank that has to send its vector (stage HOLD)."""
    successor: int = 0
    """Number of the epoch that will continue this one in place, while the members are asked how far
    they are. An agent that answers has joined that epoch and enters no epoch with a lower number.
    0: none.
    """
    successor_token: str = ""
    """Token of that epoch's claim: another coordinator may ask for the same number."""
    unclaimed: tuple[log.Claim, ...] = ()
    """Claims that are not known to be in the log, oldest first: those of epochs that this one
    continues, and its own. Its members step in the meantime, but nothing of this epoch is committed
    before its claim. Empty: it is claimed.
    """
    leaving: tuple[Id, ...] = ()
    """Ids of members that leave: their workers end now, and the others continue in place."""
    ended: tuple[int, ...] = ()
    """Living ranks whose unit has lost a rank. Their agents end them, because a unit continues
    whole or not at all (stage HOLD), or because they can save nothing (stage CUT).
    """
    saver: Saver | None = None
    started_world: int = 0
    """Number of ranks that this lineage began with: when all its members were new processes. 0: not
    known.
    """
    committed: int = 0
    """Newest step committed on this epoch's lineage."""
    kept: int = 0
    """The newest step of which all members hold their parts; older near saves are dropped. In a
    former epoch whose save is being finished (`Levels.unfinished`): the step of that save.
    """
    backlog: int = 0
    """The newest of the complete saves that cannot be committed at present. Pods keep newer ones in
    memory, because the store would only fill with their chunks. 0: newer saves are uploaded.
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
        return self._by_id.get((slot, attempt, incarnation))

    @cached_property
    def _by_id(self) -> dict[Id, EpochMember]:
        return {m.id: m for m in self.members}

    def place_after(self, former: int, id: Id) -> EpochMember | None:
        """The pod's place, if this epoch continues epoch `former` in place; None: it has none."""
        continues = self.in_place is not None and self.in_place.former == former
        return self.member(*id) if continues else None

    @property
    def resume(self) -> int:
        """The last step that was applied when the epoch began."""
        if self.in_place is not None:
            return self.in_place.applied
        return self.commit.step if self.commit else 0

    @property
    def claimed(self) -> int:
        """Number of the newest epoch in its lineage whose claim is known to be in the log."""
        return self.unclaimed[0].chain[-1].epoch if self.unclaimed else self.number

    def follows(self, claim: log.Claim) -> bool:
        """Whether `claim` is the epoch's own, is one of `unclaimed`, or is the one in the log that
        `unclaimed` follows.
        """
        own = self.token == claim.token or claim in self.unclaimed
        return own or (bool(self.unclaimed) and self.claimed == claim.epoch)

    @cached_property
    def world(self) -> int:
        return sum(len(m.ranks) for m in self.members)

    @property
    def savers(self) -> range:
        """The ranks that save after a cut."""
        return range(0) if self.saver is None else self.mesh.list_unit_of(self.saver.rank)

    @property
    def slots_together(self) -> int:
        """The number of pods in the epoch is a multiple of this."""
        return max((self.mesh.count_slots(len(m.lives)) for m in self.members), default=1)

    @property
    def live(self) -> bool:
        return self.stage in (Stage.STARTING, Stage.RUNNING)

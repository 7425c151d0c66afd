"""Frames between agent and worker over a unix stream socket. A frame is a 4-byte big-endian length
and a JSON object.

`{"type": …, "id": n, "body": {…fields}}`: a request has an id, and its answer the same one; any
other frame is one-way. Every type is a dataclass here, so both sides run the same code. Bytes
are sent as base64.

A worker: `Hello` → waits for `Start` → restores, trains, sends `Applied` at every boundary →
`Finished` at `until` → ends on `Exit`. It never decides alone what the other ranks must agree
on.
"""

import base64
import json
import struct
from dataclasses import dataclass, field
from typing import Any

from everstep_contract import codec
from everstep_contract.ledger import LedgerEntry
from everstep_contract.places import Place
from everstep_contract.ranges import Ranges
from everstep_contract.units import ONE_RANK, Mesh

LENGTH = struct.Struct(">I")
LIMIT_BYTES = 64 * 1024 * 1024


# --- agent → worker -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The epoch has started and this worker is a member of it."""

    epoch: int
    rank: int
    world: int
    mesh: Mesh = ONE_RANK
    """How the ranks form units; `world` is a whole number of them."""
    unit: str = ""
    """Prefix of the keys by which the ranks of its unit form the groups that last as long as these
    ranks. A unit of other processes has another prefix. Not used if each rank is a unit.
    """
    local_rank: int
    local_world: int
    node_rank: int
    """Index of the slot among the slots of this epoch."""
    job: str
    run: str
    applied: int = 0
    """Step to continue from: 0, or the step of `manifest`."""
    manifest: str | None = None
    """Path of the manifest file to resume from."""
    places: str | None = None
    """Path of a `Places` document: where its chunks lie."""
    staging: str
    """Folder in memory for staged saves."""
    save_every_steps: int = 0
    guard_factor: float = 10.0
    guard_action: str = "Note"
    join: bool = False
    """The epoch already runs: get ready for training (`Tracked`), then receive the state of a
    member (`TakeState`), then wait for `Regroup`. `rank` and `world` are the expected values.
    """
    script_world: int = 0
    """The size that the script sees until this rank is in its first group: the one that the scripts
    of the members saw when they started. So settings that a script computes from it are the same in
    a rank that joins later. 0: `world`.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The epoch is over: close the group's sockets and leave any collective. Then park at the next
    safe point; or, with `keep`, keep the step, answer with a `Standing`, and wait for a `Regroup`
    (or for a `Cut` without `keep`).
    """

    epoch: int
    keep: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Regroup:
    """The next epoch continues the current one in place: form its group, and continue in the same
    step with this share.
    """

    epoch: int
    rank: int
    world: int
    local_world: int
    node_rank: int
    applied: int
    """Steps up to this one belong to earlier epochs."""
    reductions: int
    """How many reductions of the former epoch are complete. They are complete on every member once
    `vector` has been applied.
    """
    share: Ranges | None = None
    """This rank's micro-batches of the next reduction, including those that it already holds; None:
    no member has begun it.
    """
    micro_batches: int = 0
    """Of the next reduction, on all ranks together; 0: not begun."""
    vector: str = ""
    """The vector of the last of these reductions, for a member that lacks it."""
    passes: int = 0
    """How many micro-batches each rank of its unit computes in the next reduction; those beyond its share are
    fillers. 0: no member has begun it, its unit has nothing to compute, or its unit is one rank.
    """
    begun: Ranges | None = None
    """For a rank that has not begun, while ranks that compute the same micro-batches have: what
    those began with, which comes first in its order. None: none of them has begun. A rank that
    received its share of this reduction in an earlier epoch already knows the order.
    """
    begun_passes: int = 0
    """How many passes those ranks began with, fillers included."""
    endpoints: tuple[str, ...] = ()
    """`Standing.endpoint` of each rank; empty: the ranks exchange them in a request to the agents."""
    complete_buckets: int = 0
    """So many buckets of the next reduction, from the first on, are complete on every rank of the epoch.
    They are not summed again.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveVector:
    """Answer with a `Standing` that contains the vector: a member lacks the vector of the last
    reduction.
    """

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveHeld:
    """Save the full state as of the boundary before the step that this worker holds, and keep
    waiting.
    """

    epoch: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveState:
    """Send the live state to a newcomer, over a group of two whose keys begin with `key`."""

    epoch: int
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeState:
    """The newcomer's side of `GiveState`. Answer: `StateTaken`."""

    epoch: int
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """Answer to `Parked`: save the full state as of the step at which this worker is parked, and
    stay parked.
    """

    epoch: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowStack:
    """Write the stacks of all threads to stderr, and continue. Sent to a worker that has waited
    long.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """End with status 0."""


# --- worker → agent -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    pid: int
    protocol: int
    in_place: bool = False
    """Whether it can keep its step when others are lost (`Regroup`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracked:
    """Start-up is complete: state is tracked and restored."""

    epoch: int
    applied: int
    bytes: int
    until: int | None = None
    feeds: dict[str, str] = field(default_factory=dict)
    """The feeds that the script has made: name → settings in words."""
    fixed: str = ""
    """Why this worker cannot enter another epoch; empty: it can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stops:
    """The script ends the training after this step, before `Tracked.until`."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Answer to a `Cut` with `keep`: how far this rank has come, and what it will still do."""

    epoch: int
    applied: int
    reductions: int
    """Complete reductions of this epoch. The same number means the same place in the training."""
    share: Ranges | None = None
    """Micro-batches of the next reduction that it holds or is going to compute; None: it has not
    begun that reduction.
    """
    micro_batches: int = 0
    """Of the next reduction, on all ranks together; 0: not begun."""
    problem: str = ""
    """Why this rank cannot regroup; empty if it can."""
    vector: str = ""
    """The vector of the last complete reduction, if the agent asked for it: float64 numbers,
    little-endian, base64.
    """
    passes: int = 0
    """How many micro-batches it has computed or will compute for the next reduction, fillers included; 0: not
    begun.
    """
    unit_lost: bool = False
    """A collective within its unit has failed: this rank cannot continue, and the unit is lost."""
    endpoint: str = ""
    """Where the other ranks reach this one to form the next group; empty: nowhere."""
    complete_buckets: int = 0
    """How many buckets of the next reduction are complete on this rank, from the first on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Regrouped:
    """This rank has formed the epoch's group."""

    epoch: int
    problem: str = ""
    """Why this rank could not form it; empty: it did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TakingState:
    """How many bytes of the state this newcomer has received, and how many it expects in all."""

    epoch: int
    received: int
    expected: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTaken:
    """This newcomer holds the state as of step `applied`."""

    epoch: int
    applied: int
    problem: str = ""
    """Why the newcomer does not hold it; empty: it does."""
    differs: bool = False
    """Its script or data differ from those of the running ranks, so another try of the same would end
    the same way.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """The boundary after `step`."""

    epoch: int
    step: int
    loss: float | None
    grad_norm: float | None
    entries: tuple[LedgerEntry, ...] = ()
    notes: tuple[str, ...] = ()
    """What every rank notes in the same words; the status shows those of the first rank."""
    own_notes: tuple[str, ...] = ()
    """What this rank alone notes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AtBoundary:
    """Request, sent when the armed boundary is this step. Reply: `BoundaryReply`."""

    epoch: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryReply:
    """`raised`: another boundary was armed, so continue. `save`: stage this rank's part here.
    `near`: as in `Staged`, unless another save is due here. `stay`: park after that. `hold`:
    newcomers join. In this case report the standing once the next loop has begun, send the state of
    this boundary if asked (`GiveState`), and complete no sum before `Regroup`.
    """

    raised: bool = False
    save: bool = False
    near: bool = False
    stay: bool = False
    hold: bool = False
    epoch: int = 0
    """With `hold`: the epoch that the newcomers join. It may be over by the time that the worker acts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchChunk:
    """Request: the worker needs the chunk `digest` of the checkpoint that it restores. Reply: `FetchedChunk`."""

    epoch: int
    digest: str
    damaged: Place | None = None
    """Where the worker found it damaged; None: it was not in this pod's memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedChunk:
    place: Place
    """Where the chunk is now; another place than the damaged one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedTensor:
    """A box of a logical tensor, contiguous and row-major at byte `at` of the staged file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    at: int
    divided: str = ""
    """Dimensions of the unit over which the tensor is divided. All ranks of a unit load what is not
    divided, so a chunk holds only tensors that are divided alike.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class PartDigests:
    """Digests of one rank's copies of the tensors in one part, in order."""

    part: int
    """The rank that stores it."""
    values: str
    """uint64 numbers, little-endian, base64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """The copy is complete; training continues. The agent now owns `path` and deletes it."""

    epoch: int
    step: int
    path: str
    tensors: tuple[StagedTensor, ...]
    state: Any = None
    """The tree of everything that is not a tensor; only from the lead (rank 0, or the rank that
    saves the full state).
    """
    lead: bool = False
    whole: bool = False
    near: bool = False
    """It stays in the near tiers, and is uploaded only if the run goes back to it."""
    ms: float = 0.0
    """How long the step was delayed, in ms."""
    layout: str = ""
    """Digest of this rank's `layout`: names, dtypes and shapes of all tracked tensors, including
    those that other ranks store.
    """
    packed: str = ""
    """The layout itself, if it differs from this rank's last save."""
    digests: tuple[PartDigests, ...] = ()
    """Of this rank's part and of some others', to compare replicas; none with `whole`."""
    not_finite: tuple[str, ...] = ()
    """Parameters and optimizer state in it that hold NaN or infinite values: it must not be committed."""
    pins: tuple[str, ...] = ()
    """Names under which the script wants this checkpoint pinned."""
    problem: str = ""
    """Why there is no copy; `path` is empty then."""
    full: bool = False
    """The reason is that there was no room for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parked:
    """This worker is out of the group, after a cut or a failed collective, or at a boundary with
    `stay`. It waits for `Save` or `Exit`.

    `step` is the last step applied; `sound` is false if the state cannot be saved as of that step.
    """

    epoch: int
    step: int
    sound: bool = True
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """`until` is reached and this rank's part of the last checkpoint is staged; the worker waits
    for `Exit`.
    """

    epoch: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """This worker cannot continue, for this reason; it exits after this frame. `cause` is a
    `report.Cause` value.
    """

    epoch: int
    step: int
    cause: str
    message: str
    traceback: str = ""
    fault: str = ""
    """The exception's type and place: distinguishes two failures of the same cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSet:
    epoch: int
    key: str
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreGet:
    """Request. Reply: `StoreReply`, sent once the key exists or `timeout_ms` is over (then `value`
    is null).
    """

    epoch: int
    key: str
    timeout_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAdd:
    """Request. Reply `StoreReply` with the new number in `number`."""

    epoch: int
    key: str
    amount: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreCompareSet:
    """Request. Reply `StoreReply` with the resulting value."""

    epoch: int
    key: str
    expected: str
    desired: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreCheck:
    """Request. Reply `StoreReply`, `number` 1 if all keys exist."""

    epoch: int
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreDelete:
    """Request. Reply `StoreReply`, `number` 1 if the key existed."""

    epoch: int
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAllGather:
    """Request. Gives `value` to all ranks. Reply: `StoreReply` with the values of all ranks, in their
    order, sent once each of them has sent this request or `timeout_ms` is over (then `values` is
    empty).
    """

    epoch: int
    key: str
    rank: int
    world: int
    value: str
    timeout_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreReply:
    value: str | None = None
    values: tuple[str, ...] = ()
    number: int = 0
    error: str = ""
    """Not empty: the epoch is over."""


FRAMES: tuple[type[Any], ...] = (
    Start, Cut, Regroup, GiveVector, GiveState, TakeState, Save, SaveHeld, ShowStack, Exit, Hello, Tracked, Stops,
    Standing, Regrouped, TakingState, StateTaken, Applied, AtBoundary, BoundaryReply, FetchChunk, FetchedChunk, Staged,
    Parked, Finished, Failed, StoreSet, StoreGet, StoreAdd, StoreCompareSet, StoreCheck, StoreDelete, StoreAllGather,
    StoreReply,
)  # fmt: skip
_BY_NAME = {cls.__name__: cls for cls in FRAMES}
for (
    _cls
) in FRAMES:  # now, so that it does not delay a rank's first recovery; forked workers inherit it
    codec.prepare(_cls)


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """`id` pairs a request with its reply; 0 for one-way frames."""

    frame: Any
    id: int = 0
    meta: dict[str, Any] = field(default_factory=dict)


def encode(frame: Any, id: int = 0) -> bytes:
    body = json.dumps(
        {"type": type(frame).__name__, "id": id, "body": codec.encode(frame)}, separators=(",", ":")
    ).encode()
    return LENGTH.pack(len(body)) + body


def decode(body: bytes) -> Envelope:
    """Raises `codec.DecodeError` for a frame that does not follow this protocol."""
    try:
        document = json.loads(body)
        cls, number = _BY_NAME[document["type"]], int(document.get("id", 0))
        content = document["body"]
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
        raise codec.DecodeError(f"wire: not a frame: {error}") from None
    return Envelope(frame=codec.decode(cls, content), id=number)


def to_text(value: bytes) -> str:
    return base64.b64encode(value).decode()


def from_text(value: str) -> bytes:
    return base64.b64decode(value)

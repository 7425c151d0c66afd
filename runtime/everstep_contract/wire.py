"""Agent and worker: frames over a unix stream socket. A frame is a 4-byte big-endian length and a JSON object.

`{"type": …, "id": n, "body": {…fields}}`: a request carries an id, its answer has the same; anything else is one-way.
Every type is a dataclass here, so both sides run the same code. Bytes travel as base64.

A worker's life: `Hello` → waits for `Start` → restores, trains, sends `Applied` at every boundary → at `until`
`Finished`, and leaves when it gets `Exit`. It never decides alone what the other ranks must agree on.
"""

import base64
import json
import struct
from dataclasses import dataclass, field
from typing import Any

from everstep_contract import codec
from everstep_contract.ledger import LedgerEntry

LENGTH = struct.Struct(">I")
LIMIT_BYTES = 64 * 1024 * 1024


# --- agent → worker -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The epoch has started and this worker is a member of it."""

    epoch: int
    rank: int
    world: int
    local_rank: int
    local_world: int
    node_rank: int
    """Index of the slot among the slots of this epoch."""
    job: str
    run: str
    applied: int = 0
    """Step to go on from: 0, or the step of `manifest`."""
    manifest: str | None = None
    """Path of the manifest file to resume from."""
    chunks: str | None = None
    """Folder that holds its verified chunks, each under its digest."""
    staging: str
    """Folder in memory for staged saves."""
    save_every_steps: int = 0
    guard_factor: float = 10.0
    guard_action: str = "Note"
    hang_seconds: float = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The epoch is over: shut the group's sockets down, come out of any collective, park at the next safe point."""

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """Answer to `Parked`: this worker saves the whole state as of the step at which it is parked, and stays parked."""

    epoch: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """End with status 0."""


# --- worker → agent -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    pid: int
    protocol: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracked:
    """Start-up is over: state is tracked and restored."""

    epoch: int
    applied: int
    bytes: int
    until: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """The boundary after `step`."""

    epoch: int
    step: int
    loss: float | None
    grad_norm: float | None
    entries: tuple[LedgerEntry, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AtBoundary:
    """Request, when the armed boundary is this step. Reply: `BoundaryReply`."""

    epoch: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryReply:
    """`raised`: another boundary was armed, go on. `save`: stage this rank's part here. `stay`: then park."""

    raised: bool = False
    save: bool = False
    stay: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedTensor:
    """A box of a logical tensor, contiguous and row-major at byte `at` of the staged file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """The copy is taken; training goes on. The agent owns `path` from here on and deletes it."""

    epoch: int
    step: int
    path: str
    tensors: tuple[StagedTensor, ...]
    state: Any = None
    """The tree of what is no tensor; only from the lead (rank 0, or the rank that saves the whole)."""
    lead: bool = False
    whole: bool = False
    ms: float = 0.0
    """How long the step's path was held up."""
    problem: str = ""
    """Why there is no copy; `path` is empty then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parked:
    """Out of the group after a cut or a failed collective, or at a boundary with `stay`; waits for Save or Exit.

    `step` is the last step applied; `sound` is false if the state cannot be saved as of that step.
    """

    epoch: int
    step: int
    sound: bool = True
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """`until` is reached and this rank's part of the last checkpoint is staged; waits for Exit."""

    epoch: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """This worker cannot go on and says why; it exits after this frame. `cause` is a `report.Cause` value."""

    epoch: int
    step: int
    cause: str
    message: str
    traceback: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSet:
    epoch: int
    key: str
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreGet:
    """Request. Reply `StoreReply`, held until the key exists or `timeout_ms` is over (then `value` is null)."""

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
    """Request. Reply `StoreReply` with the value that stands there afterwards."""

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
class StoreReply:
    value: str | None = None
    number: int = 0
    error: str = ""
    """Not empty: the epoch is over."""


FRAMES: tuple[type[Any], ...] = (
    Start, Cut, Save, Exit, Hello, Tracked, Applied, AtBoundary, BoundaryReply, Staged, Parked, Finished, Failed,
    StoreSet, StoreGet, StoreAdd, StoreCompareSet, StoreCheck, StoreDelete, StoreReply,
)  # fmt: skip
_BY_NAME = {cls.__name__: cls for cls in FRAMES}


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
    """Raises `codec.DecodeError` for a frame that is not of this protocol."""
    try:
        document = json.loads(body)
        cls = _BY_NAME[document["type"]]
    except (ValueError, KeyError, TypeError) as error:
        raise codec.DecodeError(f"wire: not a frame: {error}") from None
    return Envelope(frame=codec.decode(cls, document["body"]), id=int(document.get("id", 0)))


def to_text(value: bytes) -> str:
    return base64.b64encode(value).decode()


def from_text(value: str) -> bytes:
    return base64.b64decode(value)

"""The run log: `<run>/log/<n>.json`, n = 0, 1, 2, …; each place is written once, create-only, and
never deleted.

The log orders everything that matters about a run: which members may write (`claim`), what
exists (`commit`), what was given up (`retire`), that it ended (`done`). Rules:
`docs/exactness.md`.
"""

import json
from dataclasses import dataclass
from typing import Any

from everstep_contract import codec

DIGITS = 12


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class MemberId:
    """One worker process; a restarted worker is another member."""

    slot: int
    attempt: int
    incarnation: int
    rank: int
    life: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainLink:
    """The lineage went through `epoch` up to and including step `last_step`."""

    epoch: int
    last_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    slot: int
    attempt: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """From this place on, only the members of this epoch write."""

    epoch: int
    token: str
    """Random, chosen by the writer. If the store's answer is lost, the writer recognizes its own
    entry by this token.
    """
    members: tuple[MemberId, ...]
    coordinator: str
    job_uid: str
    job: str
    """namespace/name, for people."""
    chain: tuple[ChainLink, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    cause: str = ""
    """Why there is a new epoch: Start, WorkerDied, Leave, …; restarts are counted along the log."""
    failed: int = 0
    """The step in which `cause` occurred; 0: in none."""
    fault: str = ""
    """Distinguishes two occurrences of `cause`: the signal's name, or the exception's type and
    place.
    """
    incident: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """This checkpoint exists."""

    epoch: int
    token: str
    step: int
    manifest: str
    """Key relative to the run."""
    digest: str
    bytes: int = 0
    pins: tuple[str, ...] = ()
    """Names under which it is pinned: it is not retired until all of them are given up. A run uses
    each name only once.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Retire:
    """These checkpoints, chunks and pins are given up. Any agent may delete the objects at any time
    after this entry.
    """

    epoch: int
    token: str
    manifests: tuple[str, ...] = ()
    chunks: tuple[str, ...] = ()
    unpins: tuple[str, ...] = ()
    """Names that no longer pin a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The run has reached its end."""

    epoch: int
    token: str
    step: int


Entry = Claim | Commit | Retire | Done
_KINDS: dict[str, type[Any]] = {"claim": Claim, "commit": Commit, "retire": Retire, "done": Done}
_NAMES = {cls: name for name, cls in _KINDS.items()}


def key(place: int) -> str:
    return f"log/{place:0{DIGITS}d}.json"


def place_of(key_: str) -> int:
    return int(key_.rsplit("/", 1)[-1].removesuffix(".json"))


def encode(entry: Entry) -> bytes:
    return codec.dumps({"kind": _NAMES[type(entry)], **codec.encode(entry)})


def decode(raw: bytes | str) -> Entry:
    """Raises `codec.DecodeError` for anything that is not an entry of this log."""
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise codec.DecodeError(f"log entry: not JSON: {error}") from None
    kind = document.get("kind") if isinstance(document, dict) else None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise codec.DecodeError(f"log entry: kind {kind!r} is none of {', '.join(_KINDS)}")
    entry: Entry = codec.decode(_KINDS[kind], document, f"log entry ({kind})")
    return entry

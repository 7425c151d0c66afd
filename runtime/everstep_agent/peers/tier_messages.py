"""The documents by which pods hold chunks for each other."""

from dataclasses import dataclass

from everstep_agent.checkpoint.keeping import Save
from everstep_contract.manifest import Chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkCall:
    """Asks for `count` bytes of a chunk, from `start` on. The answer is these bytes; empty: the
    chunk is not held.
    """

    digest: str
    start: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceCall:
    """Hold this piece of a chunk. Its bytes follow the document (`incoming.pack`). The answer is a
    `TierAnswer`.
    """

    owner: str
    chunk: Chunk
    start: int
    """Pieces come in order; the last one makes the chunk complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepCall:
    """Saves that `owner` needs in this pod's memory. The answer is a `TierAnswer`."""

    owner: str
    saves: tuple[Save, ...]
    since: int
    """Step of the newest commit. Nobody needs older saves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DropCall:
    """`owner` needs nothing in this pod's memory any more. The answer is a `TierAnswer`."""

    owner: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ListCall:
    """Asks for the digests of all chunks in this pod's memory. The answer is a `TierAnswer`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierAnswer:
    digests: tuple[str, ...] = ()
    error: int = 0
    """`errno` of the failed request; 0: it was done."""
    message: str = ""

"""The documents by which pods hold chunks for each other."""

from dataclasses import dataclass

from everstep_agent.checkpoint.keeping import Save
from everstep_contract.manifest import Chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkCall:
    """For `count` bytes of a chunk, from `start` on; the answer is the bytes, none if it is not held."""

    digest: str
    start: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceCall:
    """Hold this piece of a chunk; its bytes follow the document (`incoming.pack`). The answer is a `TierAnswer`."""

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
    """Step of the newest commit: older saves are needed by nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DropCall:
    """`owner` needs nothing in this pod's memory any more. The answer is a `TierAnswer`."""

    owner: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ListCall:
    """For the digests of all chunks in this pod's memory. The answer is a `TierAnswer`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierAnswer:
    digests: tuple[str, ...] = ()
    error: int = 0
    """`errno` of what was asked and not done; 0: it was done."""
    message: str = ""

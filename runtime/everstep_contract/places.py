"""Where a worker finds the chunks of the checkpoint that it restores. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A chunk in a file, from byte `start` on."""

    path: str
    start: int
    bytes: int
    sums: Mapping[str, int] = field(default_factory=dict)
    """Where a piece of a tensor is in the chunk (`name_span`) → XXH3 of the piece (64 bits, seed
    0). With these sums a worker checks what it copies, piece by piece, at the speed of the copy.
    The digest of a chunk (BLAKE3) takes longer than the copy; it was checked when the chunk was
    fetched.
    """

    def is_at(self, other: "Place") -> bool:
        """Whether both are the same bytes of the same file."""
        return (self.path, self.start) == (other.path, other.start)


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    chunks: Mapping[str, Place]
    """By digest. A worker asks its agent for the chunks that it needs and that are not named here
    (`wire.FetchChunk`).
    """


def name_span(at: int, count: int) -> str:
    """The name of the `count` bytes of a chunk that begin at byte `at`."""
    return f"{at}+{count}"

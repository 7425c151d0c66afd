"""The documents for reading a checkpoint back: which pod reads which chunks (in the coordinator's
levels), and what a pod has read (in its report).
"""

from dataclasses import dataclass

from everstep_contract import log
from everstep_contract.ranges import Ranges, list_ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one pod reads."""

    slot: int
    attempt: int
    incarnation: int
    chunks: Ranges
    """Places in the manifest's list of chunks."""

    @property
    def id(self) -> tuple[int, int, int]:
        return self.slot, self.attempt, self.incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBack:
    commit: log.Commit
    shares: tuple[Share, ...] = ()

    def list_share(self, ident: tuple[int, int, int]) -> list[int]:
        return next((list_ranges(s.chunks) for s in self.shares if s.id == ident), [])


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadReport:
    manifest: str = ""
    """Key of the manifest of the checkpoint that this pod read from last; empty: none."""
    read: Ranges = ()
    """Places of the chunks that it has read, and that are as the manifest describes them."""
    left: int = 0
    """How many chunks of its share it has not read yet."""
    problem: str = ""
    """Why the checkpoint is broken: the manifest or a chunk is not what was committed."""

"""An agent's report to the coordinator about its uploaded share of one save."""

from dataclasses import dataclass
from typing import Any

from everstep_contract.manifest import Chunk, LedgerSegment, Tensor
from everstep_contract.wire import PartDigests

PartKey = tuple[int, int, int, bool]
"""(epoch, step, rank, whole): a later part of the same key replaces an earlier one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One rank's share of a save, sent over the wire.

    `tensors` lists only the pieces that this rank stored.
    """

    epoch: int
    step: int
    rank: int
    whole: bool = False
    """It contains everything that the rank holds (a post-mortem save). Together with the parts of
    its unit's other ranks it is the full state.
    """
    lead: bool = False
    """Carries `state` and `ledger`."""
    tensors: tuple[Tensor, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    state: Any = None
    ledger: tuple[LedgerSegment, ...] = ()
    layout: str = ""
    """Digest of the names, dtypes and shapes of the rank's complete state."""
    packed: str = ""
    """The layout itself, to name the difference if another rank has another digest."""
    digests: tuple[PartDigests, ...] = ()
    """Digests of the rank's own part and of its copy of some other parts, to compare replicas."""
    not_finite: tuple[str, ...] = ()
    """Tensors in it that hold NaN or infinite values although they must not."""
    pins: tuple[str, ...] = ()
    """Names under which the script wants this checkpoint pinned."""
    problem: str = ""
    """Why this share does not exist: the save cannot be completed."""

    @property
    def key(self) -> PartKey:
        return self.epoch, self.step, self.rank, self.whole

    @property
    def bytes(self) -> int:
        return sum(c.bytes for c in self.chunks)

"""What an agent tells the coordinator about its uploaded share of one save."""

from dataclasses import dataclass
from typing import Any

from everstep_contract.manifest import Chunk, LedgerSegment, Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One rank's share of a save; goes over the wire.

    `tensors` list only the pieces that this rank stored.
    """

    epoch: int
    step: int
    rank: int
    whole: bool = False
    """The whole state from one rank (a post-mortem save): no other part is needed."""
    lead: bool = False
    """Carries `state` and `ledger`."""
    tensors: tuple[Tensor, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    state: Any = None
    ledger: tuple[LedgerSegment, ...] = ()
    problem: str = ""
    """Why there is no such share: the save cannot be completed."""

    @property
    def bytes(self) -> int:
        return sum(c.bytes for c in self.chunks)


def replaces(new: Part, held: Part | None) -> bool:
    """Whether the newer of two parts of one rank and step is kept: its share, which may well be uploaded
    later, takes nobody's save of the whole away.
    """
    return held is None or new.whole or not held.whole

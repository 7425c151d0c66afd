"""The ledger: the samples of each global step. It covers only steps that belong to the run, not
steps that were discarded and taken again.

Every number in it is part of the step's vector, so each rank holds the same entry and any of them
can save it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from everstep_contract import codec


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """One reduction of one global step; lists are in the order of micro-batches."""

    epoch: int
    step: int
    reduction: int = 0
    feed: str = ""
    """Name of the feed that gave the samples; empty: written by a version that did not record it.
    """
    samples: tuple[int, ...]
    """Index in the dataset of each sample that was fetched and counted, in global order."""
    counts: tuple[int, ...]
    """How many ranks contributed each micro-batch; correct if all are 1."""
    weights: tuple[float, ...]
    losses: tuple[float, ...]
    loss: float
    """Σ w·loss / Σ w, summed in float64 in micro-batch order."""


def encode_lines(entries: Iterable[LedgerEntry]) -> bytes:
    return b"".join(codec.dumps(e) + b"\n" for e in entries)


def decode_lines(raw: bytes) -> list[LedgerEntry]:
    return [codec.loads(LedgerEntry, line) for line in raw.splitlines() if line]

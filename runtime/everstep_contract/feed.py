"""A feed's record: which samples it has given to the steps so far, and where the next step
continues.

A feed (`job.batches`) is an endless order over a dataset. A step that draws from it takes the
next `global_batch` positions of that order; a step that does not draw takes none. The
checkpoint holds one record for each feed from which a step has drawn, so the position of the
next step never has to be guessed from the script. Both the worker and `everstep verify` read
it.
"""

from dataclasses import dataclass
from typing import Any

from everstep_contract import codec

INDICES = "indices "
"""How Everstep's own fingerprint of a part of a dataset begins. It is the same on all ranks, as those of some
libraries are not.
"""
STATE_KEY = "feeds"
"""Key of the records in a manifest's `state` tree; a tree of version 1 has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Everything that decides which sample is at which position."""

    length: int | None
    """Samples in the dataset; None: it can only be iterated, in an order of its own."""
    seed: int
    shuffle: bool
    fingerprint: str | None = None
    """A fingerprint of the dataset's content; None: not given, so the content is not compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Consecutive draws with the same settings."""

    step: int
    """The first step that drew."""
    sample: int
    """Position of its first sample in the order; 0 is the first sample of the first pass."""
    global_batch: int
    micro_batch: int
    draws: int
    """Steps that have drawn so far."""
    order: Order
    change: str = ""
    """Why these samples do not continue the previous segment; empty: they do."""

    @property
    def next_sample(self) -> int:
        """The position after the last one used."""
        return self.sample + self.draws * self.global_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedRecord:
    """Oldest segment first; there is at least one."""

    segments: tuple[Segment, ...]

    @property
    def last(self) -> Segment:
        return self.segments[-1]


def encode_records(records: dict[str, FeedRecord]) -> dict[str, Any]:
    """Feed name → JSON values."""
    return {name: codec.encode(record) for name, record in records.items()}


def decode_records(tree: Any) -> dict[str, FeedRecord] | None:
    """The records in a manifest's `state` tree; None: its writer did not record feeds.

    Raises:
        codec.DecodeError: names the field.
    """
    if not isinstance(tree, dict) or STATE_KEY not in tree:
        return None
    found = tree[STATE_KEY]
    if not isinstance(found, dict):
        raise codec.DecodeError(f"feeds: expected an object, found {type(found).__name__}")
    records = {n: codec.decode(FeedRecord, r, f"feeds.{n}") for n, r in found.items()}
    for name, record in records.items():
        if not record.segments:
            raise codec.DecodeError(f"feeds.{name}.segments: expected at least one")
        for number, segment in enumerate(record.segments):
            _check(segment, f"feeds.{name}.segments[{number}]")
    return records


def _check(segment: Segment, where: str) -> None:
    least = {"step": 1, "sample": 0, "global_batch": 1, "micro_batch": 1, "draws": 1}
    for field, bound in least.items():
        if getattr(segment, field) < bound:
            found = getattr(segment, field)
            raise codec.DecodeError(f"{where}.{field}: expected {bound} or more, found {found}")
    if segment.order.length is not None and segment.order.length < 1:
        raise codec.DecodeError(f"{where}.order.length: expected 1 or more")

"""Whether the ranks hold the same state. Pure.

Each rank reports digests of its own part of a save and of the next two ranks' parts. Ranks that
apply the same sums to the same state stay equal bit for bit. So a difference is damage (a flipped
bit, a broken device), or state that each rank has for itself.
"""

import base64
import binascii
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from everstep_agent.checkpoint.parts import Part
from everstep_contract.layout import LOCAL, OWN, name_ranks

SHOWN = 3
"""How many tensors a message names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    tensors: tuple[str, ...]
    ranks: tuple[int, ...]
    """The ranks that differ from the majority; empty: there is no majority."""

    def describe(self) -> str:
        """For a message, without a full stop."""
        what = name_tensors(self.tensors)
        if self.ranks:
            return f"{name_ranks(list(self.ranks))} differs from the others in {what}"
        return f"the ranks differ in {what}, and there is no majority"


def name_tensors(tensors: Sequence[str]) -> str:
    names, more = ", ".join(tensors[:SHOWN]), len(tensors) - SHOWN
    return f"{names} and {more} more tensors" if more > 0 else names


def find_difference(parts: Sequence[Part]) -> Difference | None:
    """How the ranks differ in this save; None: all digests that they reported are equal."""
    tensors: list[str] = []
    odd: list[set[int]] = []
    for part in parts:
        names = [t.name for t in part.tensors if t.pieces and not t.name.startswith((OWN, LOCAL))]
        for number, held in enumerate(zip(*_list_witnesses(parts, part.rank), strict=False)):
            values = dict(held)
            if len(set(values.values())) > 1:
                tensors.append(names[number] if number < len(names) else f"part {part.rank}")
                odd.append(_find_odd(values))
    if not tensors:
        return None
    certain = set.union(*odd) if all(odd) else set()
    return Difference(tensors=tuple(dict.fromkeys(tensors)), ranks=tuple(sorted(certain)))


def _list_witnesses(parts: Sequence[Part], of: int) -> list[list[tuple[int, int]]]:
    """For each witness of a part: (its rank, digest), one for each tensor."""
    return [
        [(part.rank, value) for value in _unpack(told.values)]
        for part in parts
        for told in part.digests
        if told.part == of
    ]


def _unpack(values: str) -> tuple[int, ...]:
    try:
        raw = base64.b64decode(values, validate=True)
    except binascii.Error:
        return ()
    return struct.unpack(f"<{len(raw) // 8}Q", raw[: len(raw) // 8 * 8])


def _find_odd(values: Mapping[int, int]) -> set[int]:
    """The ranks that differ from the majority; empty: there is no majority."""
    (value, count), *_ = Counter(values.values()).most_common(1)
    if 2 * count <= len(values):
        return set()
    return {rank for rank, own in values.items() if own != value}

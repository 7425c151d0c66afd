"""Which micro-batches of a reduction that is under way each survivor of a loss computes. Pure.

Each survivor keeps what it has begun. The micro-batches of the lost ranks go to the survivors that
make the fewest passes, so that the largest number of passes is as small as possible. A pass is a
micro-batch or a filler: all ranks of a unit make the same number of passes, and ranks with fewer
micro-batches add filler passes of weight zero. Ranks with the same `Mesh.data_index` compute the
same micro-batches in the same order.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

from everstep_contract.ranges import Ranges, list_ranges, to_ranges
from everstep_contract.units import ONE_RANK, Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """What a rank computes of the reduction."""

    share: Ranges = ()
    passes: int = 0
    """Fillers included."""

    @classmethod
    def of(cls, share: Ranges | None, passes: int = 0) -> "Begun | None":
        """From a rank's standing; None: the rank has not begun."""
        if share is None:
            return None
        return cls(share=share, passes=max(passes, len(list_ranges(share))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    shares: Mapping[int, Ranges]
    """Rank → its complete share. Each micro-batch belongs to exactly one data index."""
    passes: Mapping[int, int] = field(default_factory=dict)
    """Unit → how many passes its ranks make; empty: units are single ranks."""
    begun: Mapping[int, Begun] = field(default_factory=dict)
    """Rank that has not begun → what the ranks that compute the same micro-batches began with."""


def share_out(
    begun: Mapping[int, Begun | None],
    micro_batches: int,
    mesh: Mesh = ONE_RANK,
) -> Shared | str:
    """How the reduction continues, or why it cannot.

    Args:
        begun: by rank, of whole units; None: it has not begun.
    """
    held = _by_index(begun, mesh)
    if isinstance(held, str):
        return held
    taken = sorted(r for found in held.values() if found for r in found.share)
    for (_, last), (first, _) in itertools.pairwise(taken):
        if first < last:
            return f"two ranks hold micro-batch {first}"
    more = give_rest(held, micro_batches)
    shares = {
        index: to_ranges([*list_ranges(found.share if found else ()), *more[index]])
        for index, found in held.items()
    }
    return Shared(
        shares={rank: shares[mesh.data_index(rank)] for rank in begun},
        passes=_count_passes(held, more, mesh) if mesh.unit > 1 else {},
        begun=_list_begun(begun, held, mesh),
    )


def _by_index(begun: Mapping[int, Begun | None], mesh: Mesh) -> dict[int, Begun | None] | str:
    """By data index: what its ranks have begun; None: none of them has begun."""
    held: dict[int, Begun | None] = {}
    owner: dict[int, int] = {}
    for rank, found in sorted(begun.items()):
        index = mesh.data_index(rank)
        before = held.setdefault(index, found)
        if before is None:
            held[index] = found
        elif found is not None and found != before:
            return (
                f"ranks {owner[index]} and {rank} should compute the same micro-batches, and do not"
            )
        if found is not None:
            owner.setdefault(index, rank)
    return held


def give_rest(held: Mapping[int, Begun | None], micro_batches: int) -> dict[int, list[int]]:
    """Data index → the micro-batches that it gets. Those that nobody holds go, in runs, to the
    indices that make the fewest passes.
    """
    taken = {i for found in held.values() if found for i in list_ranges(found.share)}
    rest = [i for i in range(micro_batches) if i not in taken]
    passes = {index: found.passes if found else 0 for index, found in held.items()}
    more = {}
    for index, count in _fill(passes, len(rest)).items():
        more[index], rest = rest[:count], rest[count:]
    return more


def _fill(have: Mapping[int, int], more: int) -> dict[int, int]:
    """How many of `more` each index gets, so that the largest total is as small as possible."""
    got = dict.fromkeys(sorted(have), 0)
    for _ in range(more):
        index = min(got, key=lambda i: (have[i] + got[i], i))
        got[index] += 1
    return got


def _count_passes(
    held: Mapping[int, Begun | None], more: Mapping[int, list[int]], mesh: Mesh
) -> dict[int, int]:
    """The passes of each unit."""
    passes: dict[int, int] = {}
    for index, found in held.items():
        unit, made = index // mesh.shard, (found.passes if found else 0) + len(more[index])
        passes[unit] = max(passes.get(unit, 0), made)
    return passes


def _list_begun(
    begun: Mapping[int, Begun | None], held: Mapping[int, Begun | None], mesh: Mesh
) -> dict[int, Begun]:
    """For each rank that has not begun, what its siblings have begun without it."""
    siblings = {rank: held[mesh.data_index(rank)] for rank, own in begun.items() if own is None}
    return {rank: found for rank, found in siblings.items() if found is not None}

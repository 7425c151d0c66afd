"""How work is divided: micro-batches over ranks, parameters over buckets, the bytes of a save over
ranks. Pure.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from everstep_contract.units import ONE_RANK, Mesh

SMALL_BUCKETS = 8
"""The most buckets that are chosen smaller than the limit allows. More would gain little after a loss.
"""


def plan_share(rank: int, world: int, count: int) -> range:
    """The consecutive micro-batches of one rank. The first ranks compute one more (32 over 3 ranks: 11, 11, 10)."""
    each, more = divmod(count, world)
    first = rank * each + min(rank, more)
    return range(first, first + each + (rank < more))


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter as the bucket plan sees it. It is the same on all ranks, so all launch the same buckets."""

    elements: int
    """Number of elements per rank that the plan assumes; the same on all ranks."""
    item_bytes: int
    kind: str
    """Device and dtype of its sum, and the ranks that sum; a bucket holds one kind."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward and backward of a rank."""

    index: int
    """Index of the micro-batch."""
    filler: bool = False
    """Computed without weight, only because the other ranks of the unit make a pass."""


def plan_passes(share: Sequence[int], passes: int) -> list[Pass]:
    """Plan a rank's share, and fillers until it has made as many passes as the rest of its unit."""
    return extend_passes([], share, passes)


def extend_passes(begun: Sequence[Pass], share: Sequence[int], passes: int) -> list[Pass]:
    """Plan what follows the passes that a rank has begun: new micro-batches of its share, then
    fillers. A filler repeats its last micro-batch, or micro-batch 0 if it has none.

    Args:
        share: its micro-batches, including those that it has begun.
        passes: total number of passes of its unit; 0: as many as the share needs.
    """
    held = dict.fromkeys(p.index for p in begun if not p.filler)
    new = [index for index in share if index not in held]
    last = [0, *held, *new][-1]
    fillers = max(0, passes - len(begun) - len(new))
    return [*map(Pass, new), *[Pass(last, filler=True)] * fillers]


def plan_buckets(parameters: Sequence[Parameter], limit_bytes: int) -> list[list[int]]:
    """Indices of the parameters in each bucket, in the order in which backward finishes them: the
    last parameter first. The buckets of one kind have about the same size, as far as the parameters allow.
    """
    sizes = [p.elements * p.item_bytes for p in parameters]
    total: Counter[str] = Counter()
    for parameter, size in zip(parameters, sizes, strict=True):
        total[parameter.kind] += size
    counts = {kind: count_buckets(size, limit_bytes) for kind, size in total.items()}
    filled: Counter[str] = Counter()
    buckets: dict[tuple[str, int], list[int]] = {}
    for index in reversed(range(len(parameters))):
        kind, size = parameters[index].kind, sizes[index]
        twice_middle = 2 * filled[kind] + size
        number = twice_middle * counts[kind] // max(1, 2 * total[kind])
        number = min(number, counts[kind] - 1)
        buckets.setdefault((kind, number), []).append(index)
        filled[kind] += size
    return list(buckets.values())


def count_buckets(total_bytes: int, limit_bytes: int) -> int:
    """How many buckets of about the same size: as few as the limit allows, but up to `SMALL_BUCKETS` if each then has
    at least half the limit.
    """
    fewest = math.ceil(total_bytes / limit_bytes)
    return max(1, fewest, min(SMALL_BUCKETS, total_bytes // (limit_bytes // 2)))


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSize:
    """A tensor as a save sees it."""

    name: str
    shape: tuple[int, ...]
    """Shape of this rank's local tensor."""
    item_bytes: int
    divided: frozenset[str] = frozenset()
    """The dimensions of the unit over which it is divided; empty: each rank holds all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows [first, last) of dimension 0 of this rank's local tensor; a tensor without dimensions is one row."""

    name: str
    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One of the parts into which a save is divided: one for each place of each unit that takes part."""

    mesh: Mesh = ONE_RANK
    unit: int = 0
    units: int = 1
    """How many units share the save: all, or one that saves everything."""
    place: int = 0

    @property
    def number(self) -> int:
        """The rank that stores it, if all units take part."""
        return self.unit * self.mesh.unit + self.place

    def of_one_unit(self) -> "Part":
        """This rank's part of a save that its unit makes alone."""
        return Part(mesh=self.mesh, place=self.place)

    def of_unit(self, unit: int) -> "Part":
        """The part of the same place in another unit, which holds the same state."""
        return Part(mesh=self.mesh, unit=unit % self.units, units=self.units, place=self.place)

    def count_holders(self, divided: frozenset[str]) -> tuple[int, int]:
        """Return this rank's index among the ranks that hold the same box of a tensor,
        and the number of these ranks.
        """
        index, count, tensor = self.unit, self.units, self.mesh.tensor
        shard = ("shard", self.place // tensor, self.mesh.shard)
        for name, at, size in (shard, ("tensor", self.place % tensor, tensor)):
            if name not in divided:
                index, count = index * size + at, count * size
        return index, count


def part_of(mesh: Mesh, rank: int, world: int) -> Part:
    """A rank's part of a save in which all units take part."""
    return Part(
        mesh=mesh, unit=mesh.unit_of(rank), units=world // mesh.unit, place=mesh.place_of(rank)
    )


def plan_part(sizes: Sequence[TensorSize], part: Part) -> list[Rows]:
    """Plan one rank's part of a save. Of the ranks that hold a box, each row of the box is in the
    part of exactly one, and their parts have about the same number of bytes.

    Args:
        sizes: of this rank's local tensors, in the same order on all ranks.
    """
    alike: dict[frozenset[str], list[TensorSize]] = {}
    for tensor in sizes:
        alike.setdefault(tensor.divided, []).append(tensor)
    return [
        rows
        for divided, tensors in alike.items()
        for rows in _plan_rows(tensors, *part.count_holders(divided))
    ]


def _plan_rows(sizes: Sequence[TensorSize], index: int, count: int) -> list[Rows]:
    """Lay all tensors end to end. Holder i of n gets the bytes from i/n to (i+1)/n, rounded down to
    whole rows. Tensors without bytes go to holder 0, because a checkpoint holds them, too.
    """
    total = sum(_bytes(t) for t in sizes)
    low, high = index * total // count, (index + 1) * total // count
    part: list[Rows] = []
    start = 0
    for tensor in sizes:
        size, rows = _bytes(tensor), tensor.shape[0] if tensor.shape else 1
        if size == 0:
            first, last = (0, rows) if index == 0 else (0, 0)
            wanted = index == 0
        else:
            first = min(max((low - start) * rows // size, 0), rows)
            last = min(max((high - start) * rows // size, 0), rows)
            wanted = first < last
        if wanted:
            part.append(Rows(name=tensor.name, first=first, last=last))
        start += size
    return part


def _bytes(tensor: TensorSize) -> int:
    return math.prod(tensor.shape) * tensor.item_bytes

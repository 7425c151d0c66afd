"""How work is divided: micro-batches over ranks, parameters over buckets, the bytes of a save over
ranks. Pure.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from everstep_contract.units import ONE_RANK, Mesh


def plan_share(rank: int, world: int, count: int) -> range:
    """The micro-batches of one rank, in a row; the first ranks take one more (32 over 3 ranks: 11,
    11, 10).
    """
    each, more = divmod(count, world)
    first = rank * each + min(rank, more)
    return range(first, first + each + (rank < more))


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter as the bucket plan sees it: alike on all ranks, so all launch the same buckets."""

    elements: int
    """The most that a rank holds."""
    item_bytes: int
    kind: str
    """Device and dtype of its sum, and the ranks that make it; a bucket holds one kind."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward and backward of a rank."""

    index: int
    """Of the micro-batch."""
    filler: bool = False
    """Computed without weight, only because the other ranks of the unit make a pass."""


def plan_passes(share: Sequence[int], passes: int) -> list[Pass]:
    """A rank's share, and fillers until it has made as many passes as the rest of its unit."""
    return extend_passes([], share, passes)


def extend_passes(begun: Sequence[Pass], share: Sequence[int], passes: int) -> list[Pass]:
    """What follows the passes that a rank has begun with: what is new in its share, and fillers. A filler is its last
    micro-batch once more, or the first of all if it has none.

    Args:
        share: with what it holds.
        passes: of its unit in all; 0: as many as it takes.
    """
    held = dict.fromkeys(p.index for p in begun if not p.filler)
    new = [index for index in share if index not in held]
    last = [0, *held, *new][-1]
    fillers = max(0, passes - len(begun) - len(new))
    return [*map(Pass, new), *[Pass(last, filler=True)] * fillers]


def plan_buckets(parameters: Sequence[Parameter], limit_bytes: int) -> list[list[int]]:
    """Indices of the parameters in each bucket, in the order in which backward finishes them: the
    last parameter first.
    """
    buckets: list[list[int]] = []
    filling: dict[str, tuple[list[int], int]] = {}
    for index in reversed(range(len(parameters))):
        parameter = parameters[index]
        size = parameter.elements * parameter.item_bytes
        bucket, filled = filling.get(parameter.kind, ([], limit_bytes))
        if filled + size > limit_bytes:
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.append(index)
        filling[parameter.kind] = (bucket, filled + size)
    return buckets


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSize:
    """A tensor as a save sees it."""

    name: str
    shape: tuple[int, ...]
    """Of what lies on this rank."""
    item_bytes: int
    divided: frozenset[str] = frozenset()
    """The dimensions of the unit over which it is divided; none: each rank holds it whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows [first, last) of dimension 0 of what lies on this rank; a tensor without dimensions is one row."""

    name: str
    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One of the parts into which a save is divided: one for each place of each unit that takes part."""

    mesh: Mesh = ONE_RANK
    unit: int = 0
    units: int = 1
    """How many share in the save: all, or one that saves everything."""
    place: int = 0

    @property
    def number(self) -> int:
        """The rank that stores it, if all units take part."""
        return self.unit * self.mesh.unit + self.place

    def of_one_unit(self) -> "Part":
        """This rank's part of a save that its unit makes alone."""
        return Part(mesh=self.mesh, place=self.place)

    def of_unit(self, unit: int) -> "Part":
        """That of the same place in another unit: its ranks hold the same as this one."""
        return Part(mesh=self.mesh, unit=unit % self.units, units=self.units, place=self.place)

    def count_holders(self, divided: frozenset[str]) -> tuple[int, int]:
        """Which one this rank is of those that hold the same box of a tensor, and how many they are."""
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
    """One rank's part of a save. Each row of each box is in exactly one part of the ranks that hold this box, and
    their parts have about as many bytes.

    Args:
        sizes: of what lies on this rank, in the same order on all ranks.
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
    """All tensors are laid end to end; holder i of n takes the bytes from i/n to (i+1)/n of them, rounded down to
    whole rows. Tensors without bytes go to holder 0: a checkpoint has them too.
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

"""Who computes what: micro-batches over ranks, buckets over parameters, bytes of a save over ranks.
All pure.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass


def share(rank: int, world: int, count: int) -> range:
    """The contiguous micro-batches of one rank; the first ranks take one more (32 over 3: 11, 11,
    10).
    """
    each, more = divmod(count, world)
    first = rank * each + min(rank, more)
    return range(first, first + each + (rank < more))


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """What the bucket plan needs to know of a parameter."""

    elements: int
    item_bytes: int
    kind: str
    """Device and dtype of the sum; a bucket holds one kind."""


def plan_buckets(parameters: Sequence[Parameter], limit_bytes: int) -> list[list[int]]:
    """Indices of the parameters of each bucket, in the order in which backward finishes them (the
    last first).
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
class Extent:
    """A tensor as a save sees it."""

    name: str
    shape: tuple[int, ...]
    item_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """Rows `first ..

    last` along dimension 0 of a tensor; a tensor without dimensions is one row.
    """

    name: str
    first: int
    last: int


def plan_part(extents: Sequence[Extent], rank: int, world: int) -> list[Box]:
    """The part of one rank: about an equal number of bytes each, every row of every tensor exactly
    once.

    Rank r takes the bytes `r/world .. (r+1)/world` of all tensors laid end to end, rounded down to
    whole rows. What has no bytes goes to rank 0, so that it is not forgotten.
    """
    total = sum(_bytes(e) for e in extents)
    low, high = rank * total // world, (rank + 1) * total // world
    boxes: list[Box] = []
    start = 0
    for extent in extents:
        size, rows = _bytes(extent), extent.shape[0] if extent.shape else 1
        if size == 0:
            first, last = (0, rows) if rank == 0 else (0, 0)
            wanted = rank == 0
        else:
            first = min(max((low - start) * rows // size, 0), rows)
            last = min(max((high - start) * rows // size, 0), rows)
            wanted = first < last
        if wanted:
            boxes.append(Box(name=extent.name, first=first, last=last))
        start += size
    return boxes


def _bytes(extent: Extent) -> int:
    return math.prod(extent.shape) * extent.item_bytes

"""How work is divided: micro-batches over ranks, parameters over buckets, the bytes of a save over
ranks. Pure.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass


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


def plan_fillers(share: Sequence[int], passes: int) -> list[int]:
    """Micro-batches that a rank computes once more, without weight, to make as many passes as the others of its unit."""
    return [share[-1] if share else 0] * (passes - len(share))


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
    item_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows [first, last) of dimension 0 of a tensor; a tensor without dimensions is one row."""

    name: str
    first: int
    last: int


def plan_part(sizes: Sequence[TensorSize], rank: int, world: int) -> list[Rows]:
    """The part of one rank in a save: each row of each tensor in exactly one part, and parts of
    about as many bytes.

    All tensors are laid end to end; rank r takes the bytes from r/world to (r+1)/world of them,
    rounded down to whole rows. Tensors without bytes go to rank 0: a checkpoint has them too.
    """
    total = sum(_bytes(t) for t in sizes)
    low, high = rank * total // world, (rank + 1) * total // world
    part: list[Rows] = []
    start = 0
    for tensor in sizes:
        size, rows = _bytes(tensor), tensor.shape[0] if tensor.shape else 1
        if size == 0:
            first, last = (0, rows) if rank == 0 else (0, 0)
            wanted = rank == 0
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

"""How a staged file is divided into chunks. Pure.

The invariant: every byte of every tensor is in exactly one piece; each piece is a contiguous run of
complete rows (or of complete elements) inside one chunk; no chunk exceeds the limit; and a piece
has the same offset modulo `ALIGN` in its chunk as in the file, so that a mapped chunk can be viewed
as tensors in place.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from everstep_contract.manifest import ITEM_BYTES
from everstep_contract.wire import StagedTensor

CHUNK_BYTES = 64 * 1024 * 1024
ALIGN = 64


class BadStaging(ValueError):
    """A worker's staged file does not match its description."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A part of a tensor, contiguous at bytes `start .. end` of the staged file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    start: int
    end: int
    divided: str
    """As in `StagedTensor`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPlan:
    start: int
    end: int
    boxes: tuple[Box, ...]


def plan_chunks(
    tensors: Iterable[StagedTensor], file_bytes: int, limit: int = CHUNK_BYTES
) -> list[ChunkPlan]:
    """Divide the file into chunks: boxes in file order, as many in a chunk as fit and are divided
    alike.

    Raises:
        BadStaging: an unknown dtype, a box outside its tensor or the file; names the tensor.
    """
    boxes = [b for t in tensors for b in _split(_whole(t, file_bytes), limit - ALIGN)]
    plans: list[ChunkPlan] = []
    waiting: list[Box] = []
    for box in sorted(boxes, key=lambda b: b.start):
        if waiting and not _fits(box, waiting[0], limit):
            plans.append(_plan(waiting))
            waiting = []
        waiting.append(box)
    if waiting:
        plans.append(_plan(waiting))
    return plans


def _fits(box: Box, first: Box, limit: int) -> bool:
    """Whether a box fits into the chunk that begins with `first`."""
    return box.divided == first.divided and box.end - _floor(first.start) <= limit


def _plan(boxes: list[Box]) -> ChunkPlan:
    end = max(b.end for b in boxes)
    return ChunkPlan(start=_floor(boxes[0].start), end=end, boxes=tuple(boxes))


def _floor(at: int) -> int:
    return at // ALIGN * ALIGN


def _whole(tensor: StagedTensor, file_bytes: int) -> Box:
    item = ITEM_BYTES.get(tensor.dtype)
    if item is None:
        raise BadStaging(f"tensor {tensor.name}: unknown dtype {tensor.dtype!r}")
    dims = len(tensor.shape)
    inside = len(tensor.offsets) == len(tensor.lengths) == dims and all(
        o >= 0 and n >= 0 and o + n <= d
        for o, n, d in zip(tensor.offsets, tensor.lengths, tensor.shape, strict=True)
    )
    end = tensor.at + math.prod(tensor.lengths) * item
    if not inside:
        raise BadStaging(f"tensor {tensor.name}: the staged box is outside {tensor.shape}")
    if tensor.at < 0 or end > file_bytes:
        raise BadStaging(f"tensor {tensor.name}: ends at byte {end} of a file of {file_bytes}")
    return Box(
        name=tensor.name,
        dtype=tensor.dtype,
        shape=tensor.shape,
        offsets=tensor.offsets,
        lengths=tensor.lengths,
        start=tensor.at,
        end=end,
        divided=tensor.divided,
    )


def _split(box: Box, limit: int) -> Iterator[Box]:
    """Boxes of at most `limit` bytes, in file order; an empty box yields none.

    A box is split along the first dimension that is longer than one, so in row-major order each
    resulting box is contiguous.
    """
    size = box.end - box.start
    if size == 0:
        return
    if size <= limit:
        yield box
        return
    dim = next(d for d, n in enumerate(box.lengths) if n > 1)
    row = size // box.lengths[dim]
    rows = max(1, limit // row)
    for first in range(0, box.lengths[dim], rows):
        count = min(rows, box.lengths[dim] - first)
        start = box.start + first * row
        yield from _split(_slice(box, dim, first, count, start, start + count * row), limit)


def _slice(box: Box, dim: int, first: int, count: int, start: int, end: int) -> Box:
    offsets, lengths = list(box.offsets), list(box.lengths)
    offsets[dim] += first
    lengths[dim] = count
    return Box(
        name=box.name,
        dtype=box.dtype,
        shape=box.shape,
        offsets=tuple(offsets),
        lengths=tuple(lengths),
        start=start,
        end=end,
        divided=box.divided,
    )

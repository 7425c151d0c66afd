"""Taking the copy: this rank's part of the state, into a file in memory that its agent then owns."""

import math
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from everstep import shares, state
from everstep_contract import wire
from everstep_contract.manifest import ITEM_BYTES

ALIGN = 64


class NoRoom(Exception):
    """The folder for staged copies is full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    box: shares.Box
    at: int
    bytes: int


def lay_out(tensors: state.Tensors, rank: int, world: int) -> tuple[list[Piece], int]:
    """Where each box of this rank's part lies in the file, and the size of the file."""
    extents = [
        shares.Extent(
            name=n, shape=tuple(t.shape), item_bytes=ITEM_BYTES[state.dtype_name(t.dtype)]
        )
        for n, t in tensors.items()
    ]
    pieces, end = [], 0
    for box in shares.plan_part(extents, rank, world):
        tensor = tensors[box.name]
        rows = tensor.shape[0] if tensor.dim() else 1
        size = tensor.numel() * tensor.element_size() * (box.last - box.first) // max(1, rows)
        at = -(-end // ALIGN) * ALIGN
        pieces.append(Piece(box=box, at=at, bytes=size))
        end = at + size
    return pieces, end


def write_part(
    path: str, tensors: state.Tensors, rank: int, world: int
) -> tuple[wire.StagedTensor, ...]:
    """Copy this rank's part of `tensors` to a new file at `path`. Raises `NoRoom`."""
    pieces, size = lay_out(tensors, rank, world)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        if size:
            _take_room(descriptor, path, size)
            _fill(descriptor, size, tensors, pieces)
    finally:
        os.close(descriptor)
    return tuple(_describe(tensors[p.box.name], p) for p in pieces)


def _take_room(descriptor: int, path: str, size: int) -> None:
    """Of all of it, before it is mapped: a write to a mapped page for which there is none is SIGBUS."""
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        os.unlink(path)
        folder = os.path.dirname(path)
        found = os.statvfs(folder)
        raise NoRoom(
            f"no room for {size / 2**20:.1f} MiB in {folder}, where"
            f" {found.f_bavail * found.f_frsize / 2**20:.1f} MiB are free"
            f" ({os.strerror(error.errno or 0)}): raise spec.checkpoint.stagingMemory"
        ) from None


def _fill(descriptor: int, size: int, tensors: state.Tensors, pieces: Sequence[Piece]) -> None:
    page = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    whole = torch.frombuffer(page, dtype=torch.uint8)
    for piece in pieces:
        if piece.bytes:
            source = _rows(tensors[piece.box.name], piece.box)
            room = whole[piece.at : piece.at + piece.bytes].view(source.dtype).view(source.shape)
            room.copy_(source)


def _rows(tensor: torch.Tensor, box: shares.Box) -> torch.Tensor:
    return tensor[box.first : box.last] if tensor.dim() else tensor


def _describe(tensor: torch.Tensor, piece: Piece) -> wire.StagedTensor:
    box, shape = piece.box, tuple(tensor.shape)
    lengths = (box.last - box.first, *shape[1:]) if shape else ()
    item = tensor.element_size()
    assert math.prod(lengths) * item == piece.bytes, box.name
    return wire.StagedTensor(
        name=box.name,
        dtype=state.dtype_name(tensor.dtype),
        shape=shape,
        offsets=(box.first, *(0 for _ in shape[1:])) if shape else (),
        lengths=lengths,
        at=piece.at,
    )

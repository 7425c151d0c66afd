"""Copies this rank's part of the state into a file in memory, which its agent then owns."""

import contextlib
import math
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch

from everstep import device, shares, state
from everstep.errors import StateError
from everstep.sharded import box_of, find_problem, is_sharded, list_divided, local_of
from everstep_contract import layout, wire
from everstep_contract.manifest import ITEM_BYTES

ALIGN = 64


class NoRoom(Exception):
    """The folder for staged copies is full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedRows:
    """Where rows of a tensor are in the staged file."""

    rows: shares.Rows
    at: int
    bytes: int


NOTHING: Mapping[str, torch.Tensor] = MappingProxyType({})


def lay_out(
    tensors: state.Tensors,
    part: shares.Part,
    own: Mapping[str, torch.Tensor] = NOTHING,
) -> tuple[list[StagedRows], int]:
    """Plan where each row of this part is in the file, followed by each tensor of this rank's
    `own`. Also return the size of the file in bytes. The part must be one of this rank's place,
    because the rank holds no other.

    Raises:
        StateError: a DTensor cannot be stored.
    """
    sizes = [_measure(n, t, part) for n, t in tensors.items()]
    whole = [shares.Rows(name=n, first=0, last=_count_rows(t)) for n, t in own.items()]
    laid, end, known = [], 0, {**tensors, **own}
    for rows in [*shares.plan_part(sizes, part), *whole]:
        tensor = local_of(known[rows.name])
        count = _count_rows(tensor)
        size = tensor.numel() * tensor.element_size() * (rows.last - rows.first) // max(1, count)
        at = -(-end // ALIGN) * ALIGN
        laid.append(StagedRows(rows=rows, at=at, bytes=size))
        end = at + size
    return laid, end


def _measure(name: str, tensor: torch.Tensor, part: shares.Part) -> shares.TensorSize:
    if is_sharded(tensor) and (problem := find_problem(tensor, part.mesh)):
        raise StateError(f"{name}: cannot store it: {problem}")
    return shares.TensorSize(
        name=name,
        shape=tuple(local_of(tensor).shape),
        item_bytes=ITEM_BYTES[state.dtype_name(tensor.dtype)],
        divided=list_divided(tensor),
    )


def _count_rows(tensor: torch.Tensor) -> int:
    return tensor.shape[0] if tensor.dim() else 1


def describe(tensors: state.Tensors) -> bytes:
    """Describe names, dtypes and shapes, which must be the same on every rank. For a DTensor
    the shape is the global one.
    """
    return layout.describe(
        (n, state.dtype_name(t.dtype), tuple(t.shape)) for n, t in tensors.items()
    )


def write_part(
    path: str,
    tensors: state.Tensors,
    part: shares.Part,
    own: Mapping[str, torch.Tensor] = NOTHING,
) -> tuple[wire.StagedTensor, ...]:
    """Copy this rank's part of `tensors`, and its `own`, to a new file at `path`. Raises `NoRoom`."""
    laid, size = lay_out(tensors, part, own)
    known = {**tensors, **own}
    with new_file(path, size) as descriptor:
        if size:
            _fill(descriptor, size, known, laid)
    return tuple(describe_rows(known[held.rows.name], held) for held in laid)


def read_part(path: str) -> npt.NDArray[np.uint8]:
    """The bytes of a staged file, mapped."""
    return np.memmap(path, np.uint8, "r") if os.path.getsize(path) else np.empty(0, np.uint8)


@contextlib.contextmanager
def new_file(path: str, size: int) -> Iterator[int]:
    """A context with the descriptor of a new file that has room for `size` bytes. Raises `NoRoom`."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:  # for example, there are no inodes left
        raise _no_room(path, size, error) from None
    try:
        if size:
            # Before the file is mapped: a write to a mapped page that has no memory ends in SIGBUS.
            os.posix_fallocate(descriptor, 0, size)
        yield descriptor
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise _no_room(path, size, error) from None
    finally:
        os.close(descriptor)


def _no_room(path: str, size: int, error: OSError) -> NoRoom:
    folder = os.path.dirname(path)
    free = 0
    with contextlib.suppress(OSError):
        found = os.statvfs(folder)
        free = found.f_bavail * found.f_frsize
    return NoRoom(
        f"no room for {size / 2**20:.1f} MiB in {folder}, where {free / 2**20:.1f} MiB are free"
        f" ({os.strerror(error.errno or 0)}): raise spec.checkpoint.stagingMemory, or without a cluster make room"
        " there"
    )


def _fill(descriptor: int, size: int, tensors: state.Tensors, laid: Sequence[StagedRows]) -> None:
    page = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    whole = torch.frombuffer(page, dtype=torch.uint8)
    for held in laid:
        if not held.bytes:
            continue
        source = select(tensors[held.rows.name], held.rows)
        room = whole[held.at : held.at + held.bytes]
        if source.device.type == "cpu":
            room.view(source.dtype).view(source.shape).copy_(source)
        else:
            device.fetch(source, room.numpy())


def select(tensor: torch.Tensor, rows: shares.Rows) -> torch.Tensor:
    here = local_of(tensor).detach()
    return here[rows.first : rows.last] if here.dim() else here


def describe_rows(tensor: torch.Tensor, held: StagedRows) -> wire.StagedTensor:
    rows, box = held.rows, box_of(tensor)
    offsets, lengths = box.offsets, box.lengths
    if lengths:
        offsets = (offsets[0] + rows.first, *offsets[1:])
        lengths = (rows.last - rows.first, *lengths[1:])
    item = tensor.element_size()
    assert math.prod(lengths) * item == held.bytes, rows.name
    return wire.StagedTensor(
        name=rows.name,
        dtype=state.dtype_name(tensor.dtype),
        shape=tuple(tensor.shape),
        offsets=offsets,
        lengths=lengths,
        at=held.at,
        divided=",".join(sorted(list_divided(tensor))),
    )

"""Memory for copies of this rank's part, which is allocated once and used again.

A slot is a file in memory that stays mapped. A save is a link to it: the agent reads the link and
deletes it, and a slot without links is free. So no file has to be made and no page fault occurs
between a step and its copy, and a copy that is still being uploaded is never overwritten.
"""

import mmap
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from everstep import device, shares, staging, state
from everstep.sharded import local_of
from everstep_contract import wire

COUNT = 2
"""One is uploaded while the other is written."""
MOST = 3
"""The limit where near saves are made: a save that is due while two of them are held gets one
more slot, if there is memory.
"""
Bytes = npt.NDArray[np.uint8]
_Key = tuple[shares.Part, list[tuple[str, torch.Size, torch.Size, torch.dtype]]]


@dataclass(frozen=True, slots=True)
class Slot:
    path: Path
    room: Bytes
    """[bytes]"""
    pinned: bool
    """The device copies to it directly."""

    @property
    def is_free(self) -> bool:
        return self.path.stat().st_nlink == 1

    def remove(self) -> None:
        if self.pinned:
            device.unpin(self.room)
        self.path.unlink()


class Slots:
    """The slots of one process. Not thread-safe.

    Args:
        folder: in memory. The agent removes the files whose names begin with `name` once this
            process has ended.
    """

    def __init__(self, folder: str, name: str) -> None:
        self._folder, self._name = Path(folder), name
        self._slots: list[Slot] = []
        self._made = 0
        self.limit = COUNT
        self._laid: tuple[_Key, tuple[list[staging.StagedRows], int]] | None = None
        """Layout of the last part; the next part usually has the same."""

    def prepare(self, size: int) -> None:
        """Allocate the memory for parts of `size` bytes before a save needs it. Raises `NoRoom`."""
        self._remove_smaller(size)
        while len(self._slots) < COUNT and size:
            self._slots.append(self._make(size))

    def write(
        self,
        path: str,
        tensors: state.Tensors,
        part: shares.Part,
        own: Mapping[str, torch.Tensor] = staging.NOTHING,
    ) -> tuple[tuple[wire.StagedTensor, ...], Bytes]:
        """Copy this rank's part of `tensors`, and its `own` tensors, into a free slot, and link the
        slot to `path`. Return where each of them is in the slot, and the slot's bytes, which stay
        as they are until the link is deleted.

        Raises:
            NoRoom: no slot is free, or there is no memory for a larger one.
        """
        laid, size = self._lay_out(tensors, part, own)
        slot, known = self._take(size), {**tensors, **own}
        for held in laid:
            if held.bytes:
                source = staging.select(known[held.rows.name], held.rows)
                _copy(source, slot.room[held.at : held.at + held.bytes], pinned=slot.pinned)
        if slot.pinned:
            torch.cuda.current_stream().synchronize()
        os.link(slot.path, path)
        described = (staging.describe_rows(known[held.rows.name], held) for held in laid)
        return tuple(described), slot.room

    def _lay_out(
        self, tensors: state.Tensors, part: shares.Part, own: Mapping[str, torch.Tensor]
    ) -> tuple[list[staging.StagedRows], int]:
        listed = [*tensors.items(), *own.items()]
        key = part, [(name, t.shape, local_of(t).shape, t.dtype) for name, t in listed]
        if self._laid is None or self._laid[0] != key:
            self._laid = key, staging.lay_out(tensors, part, own)
        return self._laid[1]

    def _take(self, size: int) -> Slot:
        """Find a free slot of at least this size, or make one."""
        fits = [slot for slot in self._slots if slot.is_free and len(slot.room) >= size]
        if fits:
            return fits[0]
        self._remove_smaller(size)
        if len(self._slots) >= self.limit:
            raise staging.NoRoom(f"the last {len(self._slots)} saves still wait for the store")
        self._slots.append(self._make(size))
        return self._slots[-1]

    def release(self) -> None:
        """Free the memory of the slots that hold no save."""
        self._remove_smaller(sys.maxsize)

    def _remove_smaller(self, size: int) -> None:
        for slot in [slot for slot in self._slots if slot.is_free and len(slot.room) < size]:
            slot.remove()
            self._slots.remove(slot)

    def _make(self, size: int) -> Slot:
        self._made += 1
        path = self._folder / f"{self._name}{self._made}"
        with staging.new_file(str(path), max(size, 1)) as descriptor:
            page = mmap.mmap(descriptor, max(size, 1), flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        room: Bytes = np.frombuffer(page, np.uint8)
        return Slot(path, room, pinned=device.pin(room))


def _copy(source: torch.Tensor, room: Bytes, *, pinned: bool) -> None:
    """Copy; complete on return, except for a copy from a device to pinned memory."""
    if source.device.type == "cpu":
        # numpy copies in the calling thread alone; torch would use the threads that compute.
        np.copyto(room, device.bytes_of(source).numpy())
    elif pinned:
        there = torch.from_numpy(room).view(source.dtype).view(source.shape)
        there.copy_(source.detach(), non_blocking=True)
    else:
        device.fetch(source, room)

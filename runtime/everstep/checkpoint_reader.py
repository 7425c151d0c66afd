"""Reads the tensors of a checkpoint from the places that the agent names, and checks them as they are copied."""

import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from everstep.errors import StateError
from everstep_contract import codec, manifest
from everstep_contract.places import Place, Places, name_span

BLOCK_BYTES = 2**20
"""Read, and then checked while the cache holds them."""
ALIGN = 64
"""Bytes that lie otherwise in the file, modulo this, than in memory are copied at a third of the speed (AMD, Zen 3)."""
MOST_THREADS = 4
MOST_FILES = 64
"""That stay open for the next piece."""
INLINE_BYTES = 2**20
"""Less than this is read without further threads."""
TRIES = 4
"""How many copies of a chunk are read, until one is right."""
Bytes = npt.NDArray[np.uint8]
Mend = Callable[[str, Place], Place]
"""Takes a chunk's digest, and the place where it is damaged; returns the place of another copy."""


@dataclass(frozen=True, slots=True)
class _Copy:
    piece: manifest.Piece
    into: torch.Tensor
    """A view of the destination, with the shape of the piece."""


class Checkpoint:
    """Args:
        places: path of a `Places` document.
        mend: called from any thread; None: a damaged chunk is an error.

    Raises:
        StateError: a document cannot be read.
    """

    def __init__(self, manifest_path: str, places: str, mend: Mend | None = None) -> None:
        try:
            self.manifest = manifest.decode(Path(manifest_path).read_bytes())
            self._places = dict(codec.loads(Places, Path(places).read_bytes()).chunks)
        except (OSError, ValueError, codec.DecodeError) as error:
            raise StateError(f"cannot read the checkpoint {manifest_path}: {error}") from error
        self._mend = mend
        self._tensors = {t.name: t for t in self.manifest.tensors}
        self._files: dict[str, _File] = {}
        """The one that was used last comes last."""
        self._lock = threading.Lock()

    def has(self, name: str) -> bool:
        return name in self._tensors

    def tensor(self, name: str) -> torch.Tensor:
        """As `read`, of one tensor, in memory of its own."""
        return self.read({name: None})[name]

    def read(self, wanted: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
        """Tensors by name, of the stored shape and dtype, on the CPU.

        Args:
            wanted: name → the tensor to read it into, if it fits; it is then the one that is returned.

        Raises:
            StateError: there is no such tensor, or no copy of its chunk is right.
        """
        found: dict[str, torch.Tensor] = {}
        copies: list[_Copy] = []
        for name, into in wanted.items():
            stored = self._find(name)
            if into is None or not _fits(into, stored):
                into = torch.empty(stored.shape, dtype=_dtype(stored))
            found[name] = into
            copies += [_Copy(p, _select(into, p)) for p in stored.pieces]
        self._copy(copies)
        return found

    def _find(self, name: str) -> manifest.Tensor:
        if name not in self._tensors:
            raise StateError(f"the checkpoint at step {self.manifest.step} has no tensor {name!r}")
        return self._tensors[name]

    def _copy(self, copies: list[_Copy]) -> None:
        threads = min(MOST_THREADS, len(os.sched_getaffinity(0)), len(copies))
        if threads < 2 or sum(c.into.nbytes for c in copies) < INLINE_BYTES:
            for one in copies:
                self._copy_piece(one)
            return
        largest_first = sorted(copies, key=lambda c: c.into.nbytes, reverse=True)
        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(self._copy_piece, largest_first):
                pass

    def _copy_piece(self, one: _Copy) -> None:
        whole = (
            one.into
            if one.into.is_contiguous()
            else torch.empty(one.piece.lengths, dtype=one.into.dtype)
        )
        room = _view_bytes(whole)
        for _ in range(TRIES):
            with self._lock:
                place = self._places[one.piece.chunk]
            if self._read(place, one.piece.at, room):
                break
            self._replace(one.piece.chunk, place)
        else:
            raise StateError(
                f"the checkpoint at step {self.manifest.step}: {TRIES} copies of the chunk"
                f" {one.piece.chunk} are damaged"
            )
        if whole is not one.into:
            one.into.copy_(whole)

    def _read(self, place: Place, at: int, room: Bytes) -> bool:
        """Whether the bytes from `at` on have their checksum."""
        try:
            file = self._open(place.path)
            found = read(file.number, place.start + at, room)
        except OSError:
            return False
        return found is not None and found == place.sums.get(name_span(at, len(room)))

    def _replace(self, digest: str, place: Place) -> None:
        """Another copy of a chunk that is damaged at `place`."""
        with self._lock:
            if not self._places[digest].is_at(place):
                return  # another thread has found it
            if self._mend is None:
                raise StateError(f"the chunk {digest} in {place.path} is damaged")
            self._places[digest] = self._mend(digest, place)
            self._files.pop(place.path, None)

    def _open(self, path: str) -> "_File":
        """Raises OSError."""
        with self._lock:
            file = self._files.pop(path, None) or _File(path)
            self._files[path] = file
            if len(self._files) > MOST_FILES:
                self._files.pop(next(iter(self._files)))
            return file


class _File:
    """Open for reading until the last reference to it is gone. Raises OSError."""

    def __init__(self, path: str) -> None:
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


def read(file: int, start: int, room: Bytes) -> int | None:
    """Fills `room` from byte `start` of the file on, in one pass over memory. Returns XXH3 (64 bits) of what was
    read; None: the file ends before. Raises OSError.
    """
    hasher = xxhash.xxh3_64()
    aside = _make_room_aside(start, room)
    for done in range(0, len(room), BLOCK_BYTES):
        block = room[done : done + BLOCK_BYTES]
        into = block if aside is None else aside[: len(block)]
        if not _fill(file, start + done, into.data):
            return None
        hasher.update(into.data)
        if aside is not None:
            np.copyto(block, into)
    return hasher.intdigest()


def _make_room_aside(start: int, room: Bytes) -> Bytes | None:
    """To read into first, where `room` does not lie as the file does. None: it does."""
    if len(room) < ALIGN or (room.ctypes.data - start) % ALIGN == 0:
        return None
    aside = np.empty(min(len(room), BLOCK_BYTES) + ALIGN, np.uint8)
    return aside[(start - aside.ctypes.data) % ALIGN :]


def _fill(file: int, start: int, room: memoryview) -> bool:
    """False: the file ends before."""
    while room:
        count = os.preadv(file, (room,), start)
        if not count:
            return False
        start, room = start + count, room[count:]
    return True


def _fits(into: torch.Tensor, stored: manifest.Tensor) -> bool:
    return (
        into.device.type == "cpu"
        and into.dtype == _dtype(stored)
        and tuple(into.shape) == stored.shape
        and into.is_contiguous()
    )


def _select(whole: torch.Tensor, piece: manifest.Piece) -> torch.Tensor:
    where = tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.lengths, strict=True))
    return whole.detach()[where]


def _view_bytes(tensor: torch.Tensor) -> Bytes:
    found: Bytes = tensor.reshape(-1).view(torch.uint8).numpy()
    return found


def _dtype(stored: manifest.Tensor) -> torch.dtype:
    found: torch.dtype = getattr(torch, stored.dtype)
    return found

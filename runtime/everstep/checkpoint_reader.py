"""Reads the tensors of a checkpoint from the places that the agent names, and checks them as they are copied."""

import contextlib
import mmap
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
"""Of a piece, checked and then copied while the cache holds them."""
TOUCH_BYTES = 2**22
MOST_THREADS = 4
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
        self._maps: dict[str, Bytes] = {}
        self._lock = threading.Lock()
        self._in_use = False
        threading.Thread(target=self._touch, name="everstep-map", daemon=True).start()

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
        self._in_use = True
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
            source = self._map(place.path)[place.start + at :][: len(room)]
        except (OSError, ValueError):
            return False
        return len(source) == len(room) and copy(source, room) == place.sums.get(
            name_span(at, len(room))
        )

    def _replace(self, digest: str, place: Place) -> None:
        """Another copy of a chunk that is damaged at `place`."""
        with self._lock:
            if not self._places[digest].is_at(place):
                return  # another thread has found it
            if self._mend is None:
                raise StateError(f"the chunk {digest} in {place.path} is damaged")
            self._places[digest] = self._mend(digest, place)
            self._maps.pop(place.path, None)

    def _touch(self) -> None:
        """Faults the pages in while the script builds its model: that takes as long as to copy them."""
        for place in list(self._places.values()):
            for first in range(place.start, place.start + place.bytes, TOUCH_BYTES):
                if self._in_use:
                    return
                with contextlib.suppress(OSError, ValueError):
                    self._map(place.path)[first : first + TOUCH_BYTES : mmap.PAGESIZE].sum()

    def _map(self, path: str) -> Bytes:
        """The bytes of a whole file. Raises OSError, ValueError."""
        with self._lock:
            if path not in self._maps:
                with open(path, "rb") as file:
                    page = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                self._maps[path] = np.frombuffer(page, np.uint8)
            return self._maps[path]


def copy(source: Bytes, room: Bytes) -> int:
    """Copies in one pass over memory. Returns XXH3 (64 bits) of what was copied."""
    hasher = xxhash.xxh3_64()
    for first in range(0, len(source), BLOCK_BYTES):
        block = source[first : first + BLOCK_BYTES]
        hasher.update(block.data)
        np.copyto(room[first : first + BLOCK_BYTES], block)
    return hasher.intdigest()


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

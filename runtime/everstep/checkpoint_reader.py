"""Reads the tensors of a checkpoint from the places that the agent names, and
verifies them while it copies them.
"""

import collections
import contextlib
import errno
import itertools
import mmap
import os
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from everstep import device
from everstep.errors import StateError
from everstep.sharded import Box, Like, box_of, local_of, with_local
from everstep_contract import codec, manifest
from everstep_contract.places import Place, Places, name_span

TREE_VERSION = 2
"""Version of the state tree that is written. Version 1 has no feeds. A reader of version 1 refuses
version 2, because it would use samples twice.
"""
READABLE = (1, 2)
BLOCK_BYTES = 2**20
"""A piece is copied and checked block by block, so that the check finds the block in the cache."""
TOUCH_BYTES = 2**22
MOST_THREADS = 4
MOST_MAPS = 256
"""How many files are mapped at most. Each mapping keeps a descriptor, of which a process often has
1,024, and the script needs some, too.
"""
_LACKING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
INLINE_BYTES = 2**20
"""Less than this is read in the calling thread."""
TRIES = 4
"""How many copies of a chunk are read at most, until one is intact."""
Bytes = npt.NDArray[np.uint8]
ASKED_AT_ONCE = 8
"""How many chunks the agent is asked for at the same time; it brings fewer at once."""
Fetch = Callable[[str, Place | None], Place]
"""Called with a chunk's digest and the place where it is damaged (None: it has no place yet);
returns its place."""


@dataclass(frozen=True, slots=True)
class _Copy:
    piece: manifest.Piece
    into: torch.Tensor
    """A view of the destination, with the shape of the piece or of `part`."""
    part: tuple[slice, ...] | None = None
    """The wanted part of the piece; None: all of it."""


class Checkpoint:
    """The tensors and the state tree of a checkpoint.

    Args:
        places: path of a `Places` document.
        fetch: called from any thread; None: a damaged chunk, or one without a place, is an error.

    Raises:
        StateError: a document cannot be read.
    """

    def __init__(self, manifest_path: str, places: str, fetch: Fetch | None = None) -> None:
        try:
            self.manifest = manifest.decode(Path(manifest_path).read_bytes())
            self._places = dict(codec.loads(Places, Path(places).read_bytes()).chunks)
        except (OSError, ValueError, codec.DecodeError) as error:
            raise StateError(f"cannot read the checkpoint {manifest_path}: {error}") from error
        self._fetch = fetch
        self._tensors = {t.name: t for t in self.manifest.tensors}
        self._maps: dict[str, Bytes] = {}
        """Least recently used first."""
        self._lock = threading.Lock()
        self._in_use = False
        threading.Thread(target=self._touch, name="everstep-map", daemon=True).start()

    @property
    def tree(self) -> dict[str, Any]:
        """Everything but the tensors. Raises `StateError` for a version that this reader does not know."""
        tree: dict[str, Any] = self.manifest.state or {}
        if tree.get("version") not in READABLE:
            raise StateError(
                f"the checkpoint's state tree has version {tree.get('version')}; this reader "
                f"knows {TREE_VERSION}: install the version of everstep that wrote it, or a newer "
                "one"
            )
        return tree

    def has(self, name: str) -> bool:
        return name in self._tensors

    def lacks_files(self) -> bool:
        """Whether a file with chunks of the checkpoint is gone."""
        return not all(os.path.exists(place.path) for place in self._places.values())

    def tensor(self, name: str) -> torch.Tensor:
        """Like `read`, for one tensor, in memory of its own."""
        return self.read({name: None})[name]

    def read(self, wanted: Mapping[str, torch.Tensor | Like | None]) -> dict[str, torch.Tensor]:
        """Read tensors by name, with the stored shape and dtype, to the CPU. Of a tensor that is a
        DTensor here, only the pieces that overlap with this rank's box are read.

        Args:
            wanted: name → the tensor to read into. If it fits, it is filled and returned.
                Otherwise, and for a `Like`, the result is a new tensor, divided in the same way if
                the shapes are equal. None: a new tensor.

        Raises:
            StateError: there is no such tensor, or no copy of its chunk is intact.
        """
        self._in_use = True
        found: dict[str, torch.Tensor] = {}
        copies: list[_Copy] = []
        for name, into in wanted.items():
            stored = self._find(name)
            found[name] = _take_room(into, stored)
            box, here = box_of(found[name]), local_of(found[name]).detach()
            copies += [c for p in stored.pieces if (c := _plan_copy(p, box, here)) is not None]
        self._copy(copies)
        return found

    def _find(self, name: str) -> manifest.Tensor:
        if name not in self._tensors:
            raise StateError(f"the checkpoint at step {self.manifest.step} has no tensor {name!r}")
        return self._tensors[name]

    def _copy(self, copies: list[_Copy]) -> None:
        self._bring({c.piece.chunk for c in copies} - self._places.keys())
        threads = min(MOST_THREADS, len(os.sched_getaffinity(0)), len(copies))
        waiting = collections.deque(sorted(copies, key=lambda c: c.into.nbytes, reverse=True))
        if threads < 2 or sum(c.into.nbytes for c in copies) < INLINE_BYTES:
            self._copy_all(waiting)
            return
        with ThreadPoolExecutor(threads - 1) as pool:
            others = [pool.submit(self._copy_all, waiting) for _ in range(threads - 1)]
            self._copy_all(waiting)
        for other in others:
            other.result()

    def _copy_all(self, waiting: collections.deque[_Copy]) -> None:
        """Copy the pieces, which several threads take from one queue. The calling thread is one of
        them: if it waited for the others instead, it would wake up for each piece.
        """
        while (one := _take(waiting)) is not None:
            self._copy_piece(one)

    def _copy_piece(self, one: _Copy) -> None:
        """Copy a piece. It is verified completely, even if only a part of it is wanted."""
        at_once = one.part is None and one.into.is_contiguous()
        whole = (
            one.into
            if at_once
            else torch.empty(one.piece.lengths, dtype=one.into.dtype, device="cpu")
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
            one.into.copy_(whole if one.part is None else whole[one.part])

    def _read(self, place: Place, at: int, room: Bytes) -> bool:
        """Read the bytes from `at` on into `room`. Return whether they match their checksum.

        Raises `StateError` if this process has no descriptors or no memory left.
        """
        try:
            source = self._map(place.path)[place.start + at :][: len(room)]
        except OSError as error:
            if error.errno in _LACKING:
                raise StateError(
                    f"cannot read the checkpoint from {place.path}: {error}"
                ) from error
            return False
        except ValueError:
            return False
        return len(source) == len(room) and copy(source, room) == place.sums.get(
            name_span(at, len(room))
        )

    def _bring(self, absent: Collection[str]) -> None:
        """Have the agent bring these chunks here."""
        if not absent:
            return
        if self._fetch is None:
            raise StateError(f"the chunk {min(absent)} was not fetched")
        with ThreadPoolExecutor(min(ASKED_AT_ONCE, len(absent))) as pool:
            ordered = sorted(absent)
            found = list(pool.map(self._fetch, ordered, itertools.repeat(None)))
        with self._lock:
            self._places.update(zip(ordered, found, strict=True))

    def _replace(self, digest: str, place: Place) -> None:
        """Find another copy of a chunk that is damaged at `place`."""
        with self._lock:
            if not self._places[digest].is_at(place):
                return  # another thread has replaced it already
            if self._fetch is None:
                raise StateError(f"the chunk {digest} in {place.path} is damaged")
            self._places[digest] = self._fetch(digest, place)
            self._maps.pop(place.path, None)

    def _touch(self) -> None:
        """Fault the pages in while the script builds its model: that takes as long as copying them."""
        for place in list(self._places.values()):
            for first in range(place.start, place.start + place.bytes, TOUCH_BYTES):
                if self._in_use:
                    return
                with contextlib.suppress(OSError, ValueError):
                    self._map(place.path)[first : first + TOUCH_BYTES : mmap.PAGESIZE].sum()

    def _map(self, path: str) -> Bytes:
        """The bytes of a complete file; the least recently used files are unmapped, once nobody
        reads them any more. Raises OSError, ValueError.
        """
        with self._lock:
            found = self._maps.pop(path, None)
            if found is None:
                while len(self._maps) >= MOST_MAPS:
                    del self._maps[next(iter(self._maps))]
                with open(path, "rb") as file:
                    page = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                found = np.frombuffer(page, np.uint8)
            self._maps[path] = found
            return found


def copy(source: Bytes, room: Bytes) -> int:
    """Copy in one pass over memory. Return the XXH3 (64 bits) of what was copied."""
    hasher = xxhash.xxh3_64()
    for first in range(0, len(source), BLOCK_BYTES):
        block = source[first : first + BLOCK_BYTES]
        np.copyto(room[first : first + BLOCK_BYTES], block)
        hasher.update(block.data)
    return hasher.intdigest()


def _take(waiting: collections.deque[_Copy]) -> _Copy | None:
    try:
        return waiting.popleft()
    except IndexError:
        return None


def _take_room(wanted: torch.Tensor | Like | None, stored: manifest.Tensor) -> torch.Tensor:
    """Return the tensor to read into: the wanted one, or a new one that is divided like it."""
    like = wanted.tensor if isinstance(wanted, Like) else wanted
    if like is None or tuple(like.shape) != stored.shape:
        return torch.empty(stored.shape, dtype=_dtype(stored), device="cpu")
    here = local_of(like)
    if like is wanted and _fits(here, stored):
        return like
    return with_local(like, torch.empty(here.shape, dtype=_dtype(stored), device="cpu"))


def _fits(here: torch.Tensor, stored: manifest.Tensor) -> bool:
    return here.device.type == "cpu" and here.dtype == _dtype(stored) and here.is_contiguous()


def _plan_copy(piece: manifest.Piece, box: Box, here: torch.Tensor) -> _Copy | None:
    """Plan the copy of what a piece holds of the box. None: it holds nothing of it."""
    sides = list(zip(piece.offsets, piece.lengths, box.offsets, box.lengths, strict=True))
    common = [(max(at, bt), min(at + an, bt + bn)) for at, an, bt, bn in sides]
    if any(first >= last for first, last in common):
        return None
    into = here[
        tuple(slice(a - bt, b - bt) for (a, b), (_, _, bt, _) in zip(common, sides, strict=True))
    ]
    if into.shape == piece.lengths:
        return _Copy(piece, into)
    part = tuple(slice(a - at, b - at) for (a, b), (at, *_) in zip(common, sides, strict=True))
    return _Copy(piece, into, part)


def _view_bytes(tensor: torch.Tensor) -> Bytes:
    found: Bytes = device.bytes_of(tensor).numpy()
    return found


def _dtype(stored: manifest.Tensor) -> torch.dtype:
    found: torch.dtype = getattr(torch, stored.dtype)
    return found

"""Which sample is at which place of a feed's order: a function of seed and place, never
of rank or world size. Pure.

The order is perm(seed, 0), perm(seed, 1), …: one permutation for each pass over the data. Steps
take consecutive places, so a step may span two passes and no sample is dropped. The permutation is
a keyed Feistel network with cycle walking: any place can be computed alone, without a table of all
places.
"""

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt

Places = npt.NDArray[np.int64]
_ROUNDS = 6
BLOCK = 1024
"""Places that are computed at a time, but no more than one pass has: each pass costs a permutation."""
_M1, _M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def derive(*parts: Any) -> int:
    """A 64-bit number that depends on all `parts` and nothing else."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def sample_ids(first: int, count: int, *, size: int, seed: int, shuffle: bool) -> list[int]:
    """Dataset indices at the places [first, first + count) of the order over `size` samples."""
    places = np.arange(first, first + count, dtype=np.int64)
    passes, offsets = places // size, places % size
    if shuffle:
        for number in np.unique(passes):
            here = passes == number
            offsets[here] = permute(
                offsets[here], size=size, key=derive("order", seed, int(number))
            )
    found: list[int] = offsets.tolist()
    return found


class Blocks:
    """`sample_ids` of one feed, computed for a block of places at a time: a block costs little more than
    one micro-batch.
    """

    def __init__(self, *, size: int, seed: int, shuffle: bool) -> None:
        self._size, self._seed, self._shuffle = size, seed, shuffle
        self._first, self._ids = 0, list[int]()

    def take(self, first: int, count: int) -> list[int]:
        start = first - self._first
        if start < 0 or start + count > len(self._ids):
            self._first, start = first, 0
            self._ids = sample_ids(
                first,
                max(count, min(BLOCK, self._size)),
                size=self._size,
                seed=self._seed,
                shuffle=self._shuffle,
            )
        return self._ids[start : start + count]


def permute(places: Places, *, size: int, key: int) -> Places:
    """The image of each of `places`, all in [0, size), under the permutation that `key` names."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = [np.uint64(derive("round", key, r)) for r in range(_ROUNDS)]
    values = _feistel(places.astype(np.uint64), half, keys)
    while (outside := values >= np.uint64(size)).any():
        values[outside] = _feistel(values[outside], half, keys)
    return values.astype(np.int64)


def _feistel(
    values: npt.NDArray[np.uint64], half: int, keys: list[np.uint64]
) -> npt.NDArray[np.uint64]:
    width, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> width, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << width) | right


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finalizer of splitmix64 (Steele, Lea, Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * _M1
    x = (x ^ (x >> np.uint64(27))) * _M2
    return x ^ (x >> np.uint64(31))

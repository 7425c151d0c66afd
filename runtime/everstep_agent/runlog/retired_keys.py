"""The keys of retired chunks, in a tenth of the memory of their texts. Pure.

No entry of the log is ever deleted, and a large model retires millions of chunks in a month. The
keys of one save differ only in their digests, so these are kept without the rest of the key, sorted,
and cut to half: 16 bytes of a cryptographic digest still tell any two chunks apart.
"""

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence

BYTES = 16
DIGITS = 64
"""Of a complete digest."""
_DIGESTS = re.compile(r"[0-9a-f]+", re.ASCII)


class RetiredKeys:
    def __init__(self) -> None:
        self._packed: dict[str, tuple[bytes, ...]] = {}
        """What the keys of one save have in common → for each entry of the log, their digests."""
        self._others: set[str] = set()
        """Keys that do not end with a digest."""

    def add(self, keys: Iterable[str]) -> None:
        """Add the keys of one entry."""
        found = defaultdict[str, list[str]](list)
        for key in keys:
            found[key[:-DIGITS]].append(key[-DIGITS:])
        for common, names in found.items():
            if _are_digests(common, names):
                cut = sorted({name[: 2 * BYTES] for name in names})
                packed = bytes.fromhex("".join(cut))
                self._packed[common] = (*self._packed.get(common, ()), packed)
            else:
                self._others.update(common + name for name in names)

    def __contains__(self, key: str) -> bool:
        common, name = key[:-DIGITS], key[-DIGITS:]
        if key in self._others or not _are_digests(common, [name]):
            return key in self._others
        digest = bytes.fromhex(name[: 2 * BYTES])
        return any(_holds(packed, digest) for packed in self._packed.get(common, ()))


def _are_digests(common: str, names: Sequence[str]) -> bool:
    return bool(common) and _DIGESTS.fullmatch("".join(names)) is not None


def _holds(packed: bytes, digest: bytes) -> bool:
    def read(place: int) -> bytes:
        return packed[place * BYTES : (place + 1) * BYTES]

    return read(bisect_left(range(len(packed) // BYTES), digest, key=read)) == digest

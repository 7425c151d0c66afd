"""The digest of a chunk, and checksums of the tensors in it.

The digest is `b3-` and BLAKE3 in hex; in older runs it is SHA-256 in hex. With the checksums (XXH3)
a worker checks what it copies from memory. On a processor without instructions for SHA-256, BLAKE3
takes a third of the CPU time of SHA-256 (0.2 and 0.6–1.2 ns a byte, AVX-512). XXH3 takes a sixth of
the time of BLAKE3 (0.03).
"""

import hashlib
from collections.abc import Collection
from typing import Protocol

import xxhash
from blake3 import blake3

from everstep_contract.manifest import BLAKE3_PREFIX as PREFIX
from everstep_contract.places import name_span

SHOWN = 12
Spans = Collection[tuple[int, int]]
"""The first byte and the length of each piece."""


class Hash(Protocol):
    """A hash object, as in hashlib and blake3."""

    def update(self, data: bytes | memoryview, /) -> object: ...
    def hexdigest(self) -> str: ...


def compute(body: bytes | memoryview) -> str:
    return PREFIX + blake3(body).hexdigest()


def begin(digest: str) -> Hash:
    """A new hash of the same kind as `digest`."""
    return blake3() if digest.startswith(PREFIX) else hashlib.sha256()


def find_difference(found: Hash, digest: str) -> str:
    """How the hash `found` differs from `digest`, for a message; empty: it does not."""
    kind, prefix = ("BLAKE3", PREFIX) if digest.startswith(PREFIX) else ("SHA-256", "")
    digits, expected = found.hexdigest(), digest.removeprefix(prefix)
    if digits == expected:
        return ""
    return f"{kind} {digits[:SHOWN]}…, expected {expected[:SHOWN]}…"


def sum_pieces(body: bytes | memoryview, spans: Spans) -> dict[str, int]:
    """XXH3 (64 bits) of each piece."""
    with memoryview(body) as view:
        return {
            name_span(at, count): xxhash.xxh3_64_intdigest(view[at : at + count])
            for at, count in spans
        }


class PieceSums:
    """Computes what `sum_pieces` returns, for a body that arrives in parts."""

    def __init__(self, spans: Spans) -> None:
        self._coming = sorted(spans, reverse=True)
        self._begun: list[tuple[int, int, xxhash.xxh3_64]] = []
        self._at = 0
        self.sums: dict[str, int] = {}
        """The pieces that have arrived completely."""

    def update(self, part: bytes | memoryview) -> None:
        end = self._at + len(part)
        while self._coming and self._coming[-1][0] < end:
            self._begun.append((*self._coming.pop(), xxhash.xxh3_64()))
        with memoryview(part) as view:
            for at, count, found in self._begun:
                found.update(view[max(0, at - self._at) : at + count - self._at])
        for at, count, found in self._begun:
            if at + count <= end:
                self.sums[name_span(at, count)] = found.intdigest()
        self._begun = [piece for piece in self._begun if piece[0] + piece[1] > end]
        self._at = end

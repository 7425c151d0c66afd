"""The digest of a chunk, and checksums of the tensors in it.

The digest is `b3-` and BLAKE3 in hex; in older runs it is SHA-256 in hex. With the checksums (XXH3)
a worker checks what it copies from memory. On a processor without instructions for SHA-256, BLAKE3
takes a third of the CPU time of SHA-256 (0.2 and 0.6–1.2 ns a byte, AVX-512). XXH3 takes a sixth of
the time of BLAKE3 (0.03).
"""

import hashlib
from collections.abc import Iterable

import xxhash
from blake3 import blake3

from everstep_agent.storage.store import Hash
from everstep_contract.manifest import BLAKE3_PREFIX as PREFIX
from everstep_contract.places import name_span

SHOWN = 12


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


def sum_pieces(body: bytes | memoryview, spans: Iterable[tuple[int, int]]) -> dict[str, int]:
    """XXH3 (64 bits) of each piece. `spans`: the first byte and the length of each."""
    with memoryview(body) as view:
        return {
            name_span(at, count): xxhash.xxh3_64_intdigest(view[at : at + count])
            for at, count in spans
        }

"""The model that the storm trains: a few integers, so that a sum is exact in any order. Pure
functions.

A step adds the contribution of each of its samples. The samples of a step depend on the step alone,
and a sample's contribution on the seed and the sample alone. So any number of ranks takes the same
steps.
"""

import hashlib
import struct
from collections.abc import Iterable, Sequence

BATCH = 6
MICRO = 2
LENGTH = 4
PRIME = 2**50 - 27
"""Values stay below 2**53, so a float64 holds each of them exactly."""


def samples_of(step: int) -> range:
    """Samples of global step `step`, counted from 1."""
    return range((step - 1) * BATCH, step * BATCH)


def share_of(step: int, rank: int, world: int) -> tuple[int, ...]:
    """The samples of this rank's micro-batches, in order."""
    samples = samples_of(step)
    parts = [samples[i : i + MICRO] for i in range(0, BATCH, MICRO)]
    return tuple(s for number, part in enumerate(parts) if number % world == rank for s in part)


def contribution(seed: int, samples: Iterable[int]) -> list[int]:
    total = [0] * LENGTH
    for sample in samples:
        digest = hashlib.sha256(f"{seed}/{sample}".encode()).digest()
        for i, value in enumerate(struct.unpack_from(f">{LENGTH}I", digest)):
            total[i] += value
    return total


def advance(values: Sequence[int], summed: Sequence[int]) -> list[int]:
    return [(3 * v + s) % PRIME for v, s in zip(values, summed, strict=True)]


def pack(values: Sequence[int]) -> bytes:
    return struct.pack(f"<{LENGTH}d", *values)


def digest_of(values: Sequence[int]) -> str:
    return hashlib.sha256(pack(values)).hexdigest()[:16]

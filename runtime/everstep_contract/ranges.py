"""Sets of micro-batches as ranges, which stay short in a document however many there are."""

from collections.abc import Iterable

Ranges = tuple[tuple[int, int], ...]
"""[first, last) ranges, ascending."""


def to_ranges(indices: Iterable[int]) -> Ranges:
    found: list[tuple[int, int]] = []
    for index in sorted(indices):
        if found and found[-1][1] == index:
            found[-1] = found[-1][0], index + 1
        else:
            found.append((index, index + 1))
    return tuple(found)


def list_ranges(ranges: Ranges) -> list[int]:
    return [index for first, last in ranges for index in range(first, last)]

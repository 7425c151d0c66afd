"""A dataset that can only be iterated, read by place in its endless repetition.

Every rank reads the complete stream and keeps its share. A place means the same sample on every
rank and after a resume only if the iterable yields the same order each time. That cannot be
checked, so such a run is resumable, not exact.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from everstep.errors import Misuse


class Stream:
    """Raises `Misuse` for an iterable that can be iterated only once, or that yields nothing."""

    def __init__(self, source: Iterable[Any]) -> None:
        self._name = type(source).__name__
        self._source = source
        self._samples: Iterator[Any] = iter(source)
        if self._samples is source:
            raise Misuse(
                f"job.batches: a {self._name} can be iterated once only, so no run could be "
                "resumed; give a dataset with __len__ and __getitem__, or an iterable that starts "
                "again with each iter()"
            )
        self._next = 0

    def __getitems__(self, places: Sequence[int]) -> list[Any]:
        return [self._sample(place) for place in places]

    def _sample(self, place: int) -> Any:
        if place < self._next:
            self._samples, self._next = iter(self._source), 0
        for _ in range(place - self._next):
            self._advance()
        return self._advance()

    def _advance(self) -> Any:
        self._next += 1
        for sample in self._samples:
            return sample
        self._samples = iter(self._source)
        for sample in self._samples:
            return sample
        raise Misuse(f"job.batches: {self._name} yields no samples")

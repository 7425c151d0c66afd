"""A dataset that can only be iterated, read by place in its endless repetition.

Every rank reads the complete stream and keeps its share. A place means the same sample on every
rank and after a resume only if the iterable yields the same order each time. The stream has random
states of its own, seeded from the seed of the feed and the number of the pass. So an iterable that
shuffles with torch, numpy or `random` has the same order everywhere, and another one with another
seed. Whether others have cannot be checked, so such a run is resumable, not exact.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from everstep import randomness
from everstep.errors import Misuse


class Stream:
    """Raises `Misuse` for an iterable that can be iterated only once, or that yields nothing.
    `seed`: of its random numbers.
    """

    def __init__(self, source: Iterable[Any], seed: int = 0) -> None:
        self._name = type(source).__name__
        self._source, self._seed = source, seed
        self._own: dict[str, Any] | None = None
        """The random states with which the stream continues."""
        with self._own_states():
            self._begin(0)
        if self._samples is source:
            raise Misuse(
                f"job.batches: a {self._name} can be iterated once only, so no run could be "
                "resumed; give a dataset with __len__ and __getitem__, or an iterable that starts "
                "again with each iter()"
            )
        self._next = 0

    def __getitems__(self, places: Sequence[int]) -> list[Any]:
        with self._own_states():
            return [self._sample(place) for place in places]

    @contextmanager
    def _own_states(self) -> Iterator[None]:
        """Let the stream draw its own random numbers, and nobody else's."""
        outside = randomness.capture()
        if self._own is not None:
            randomness.restore(self._own)
        try:
            yield
        finally:
            self._own = randomness.capture()
            randomness.restore(outside)

    def _begin(self, number: int) -> None:
        """Begin a pass. `number`: of passes before it."""
        self._pass = number
        randomness.seed_all("stream", self._seed, number)
        self._samples: Iterator[Any] = iter(self._source)

    def _sample(self, place: int) -> Any:
        if place < self._next:
            self._begin(0)
            self._next = 0
        for _ in range(place - self._next):
            self._advance()
        return self._advance()

    def _advance(self) -> Any:
        self._next += 1
        for sample in self._samples:
            return sample
        self._begin(self._pass + 1)
        for sample in self._samples:
            return sample
        raise Misuse(f"job.batches: {self._name} yields no samples")

"""A dataset that can only be iterated, read by place in its endless repetition.

Every rank reads the complete stream and keeps its share. A place means the same sample on every
rank and after a resume only if the iterable yields the same order each time. The stream has random
states of its own, seeded from the seed of the feed and the number of the pass. So an iterable that
shuffles with torch, numpy or `random` has the same order everywhere, and another one with another
seed. Whether others have cannot be checked, so such a run is resumable, not exact.

A rank may have to go back in a step: after a loss it takes over a micro-batch before its own last one,
and a step may have several loops. So the stream keeps the samples of one global batch, those of other
ranks too. What is further back is read again from the start, which only a new process needs.
"""

import copy
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from everstep import randomness
from everstep.errors import Misuse


class Stream:
    """Raises `Misuse` for an iterable that can be iterated only once, or that yields nothing.

    What it keeps are the objects that the iterable yielded, so this has to yield a new object for each
    sample. A tensor that the script changes in place is changed when it is served again. But `collate`
    may take items out of a sample that is a list or a dict.

    Args:
        seed: of its random numbers.
        keep: how many samples are kept, the last ones that were read; the feed's global batch.
    """

    def __init__(self, source: Iterable[Any], seed: int = 0, *, keep: int) -> None:
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
        self._raised = False
        """The iterable has raised an exception and yielded nothing since."""
        self._kept: deque[Any] = deque(maxlen=keep)
        """The samples at the places before `_next`."""

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
        if place < self._next - len(self._kept):
            self._go_to_start()
        while self._next <= place:
            self._kept.append(self._read())
            self._next += 1
        sample = self._kept[place - self._next]
        return copy.copy(sample) if type(sample) in (dict, list) else sample

    def _go_to_start(self) -> None:
        self._begin(0)
        self._kept.clear()
        self._next = 0

    def _read(self) -> Any:
        try:
            for sample in self._samples:
                self._raised = False
                return sample
        except Exception:
            self._raised = True
            raise
        if self._raised:  # it ended with its exception, as a generator does: the pass is not over
            self._raised = False
            self._go_to_start()
            return self._read()
        self._begin(self._pass + 1)
        for sample in self._samples:
            return sample
        raise Misuse(f"job.batches: {self._name} {self._why_empty()}")

    def _why_empty(self) -> str:
        if not self._next:
            return "yields no samples"
        return (
            f"yielded {self._next} samples, and none when it was iterated again; let __iter__ return a new iterator "
            "each time, not one that the dataset keeps"
        )

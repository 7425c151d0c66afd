"""One micro-batch, and how it is fetched: in the same way in the rank's process and in a data worker."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from everstep import randomness


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Everything that determines a micro-batch. So a batch that was fetched for another step, or
    from other samples, is never used in its place.
    """

    seed: tuple[Any, ...]
    """What the micro-batch's random numbers depend on."""
    ids: tuple[int, ...]
    """Dataset indices."""
    loop: int = 1
    """Which loop over the feed asks for it; a step may have several."""


@dataclass(frozen=True, slots=True)
class Source:
    """What batches are made from. A data worker gets a copy."""

    dataset: Any
    collate: Callable[[list[Any]], Any]

    def fetch(self, request: Request) -> Any:
        """Return the collated samples. Sets all random states."""
        randomness.seed_all("fetch", *request.seed)
        try:
            return self.read(request.ids)
        except StopIteration as error:  # the loop over step.batches would seem to have ended
            raise RuntimeError(
                f"job.batches: {type(self.dataset).__name__} or collate raised StopIteration, probably in a next() "
                "whose iterator had ended. Let __getitem__ return the sample of every index below __len__"
            ) from error

    def read(self, ids: Sequence[int]) -> Any:
        many = getattr(self.dataset, "__getitems__", None)
        samples = many(list(ids)) if callable(many) else [self.dataset[i] for i in ids]
        return self.collate(samples)


@dataclass(slots=True)
class Rhythm:
    """How a script draws from a feed: at every how many steps, and in how many loops of a step."""

    step: int = 0
    """Step of the newest draw."""
    every: int = 1
    loop: int = 0
    loops: int = 1
    """Loops of the previous step that drew from the feed, or of this one if it has had more."""

    def begin_loop(self, step: int) -> int:
        """Begin a loop of `step`. Return its number in the step, from 1."""
        if step != self.step:
            self.loops, self.every = max(self.loop, 1), step - self.step if self.step else 1
            self.step, self.loop = step, 0
        self.loop += 1
        self.loops = max(self.loops, self.loop)
        return self.loop


def list_coming(
    rhythm: Rhythm, left: Sequence[int], share: Sequence[int], until: int
) -> Iterator[tuple[int, int, int]]:
    """Yield (draws from now, loop, micro-batch) in the order in which this rank will ask for them,
    if the script continues as before. Pure.

    Args:
        left: micro-batches that are left in the current loop.
        share: micro-batches of each later loop.
    """
    yield from ((0, rhythm.loop, index) for index in left)
    yield from (
        (0, loop, index) for loop in range(rhythm.loop + 1, rhythm.loops + 1) for index in share
    )
    for draw in range(1, (until - rhythm.step) // rhythm.every + 1):
        yield from ((draw, loop, index) for loop in range(1, rhythm.loops + 1) for index in share)

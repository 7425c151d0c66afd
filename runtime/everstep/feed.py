"""The data of a job, cut into global batches and micro-batches in a fixed order."""

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import IterableDataset, default_collate

from everstep import given, order
from everstep.errors import Misuse
from everstep.stream import Stream


class Batches:
    """What `job.batches` returns; stateless, so that any rank can fetch any micro-batch of any
    step.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        global_batch: int,
        micro_batch: int,
        seed: int,
        shuffle: bool,
        collate: Callable[[list[Any]], Any] | None,
    ) -> None:
        global_batch, micro_batch = _sizes(global_batch, micro_batch)
        self.exact = not is_stream(dataset)
        """False: the order is the iterable's own, and resuming skips what was read."""
        self.dataset: Any = dataset if self.exact else Stream(dataset)
        self.size = _size(dataset) if self.exact else 0
        self.global_batch = global_batch
        self.micro_batch = micro_batch
        self.seed = seed
        self.shuffle = shuffle
        self._collate = given.callable_or_none("job.batches: collate", collate) or default_collate

    @property
    def micro_batches(self) -> int:
        """Micro-batches in a global batch; the last may be smaller."""
        return -(-self.global_batch // self.micro_batch)

    def places(self, index: int) -> range:
        """Places of micro-batch `index` in its global batch."""
        first = index * self.micro_batch
        return range(first, min(first + self.micro_batch, self.global_batch))

    def ids(self, step: int, index: int) -> list[int]:
        """Dataset indices of micro-batch `index` of step `step` (1, 2, …)."""
        places = self.places(index)
        first = (step - 1) * self.global_batch + places.start
        if not self.exact:
            return list(range(first, first + len(places)))
        return order.sample_ids(
            first, len(places), size=self.size, seed=self.seed, shuffle=self.shuffle
        )

    def pass_ids(self, index: int) -> list[int]:
        """Dataset indices of micro-batch `index` of one plain pass over the data, in order."""
        first = index * self.micro_batch
        return list(range(first, min(first + self.micro_batch, self.size)))

    @property
    def pass_micro_batches(self) -> int:
        if not self.exact:
            raise Misuse("job.evaluate: needs a dataset with __len__ and __getitem__")
        return -(-self.size // self.micro_batch)

    def fetch(self, ids: Sequence[int]) -> Any:
        """The collated samples."""
        many = getattr(self.dataset, "__getitems__", None)
        samples = many(list(ids)) if callable(many) else [self.dataset[i] for i in ids]
        return self._collate(samples)


def is_stream(dataset: Any) -> bool:
    """Whether it can only be iterated."""
    if isinstance(dataset, IterableDataset):
        return True
    if not hasattr(dataset, "__getitem__") and not hasattr(dataset, "__iter__"):
        raise Misuse(
            f"job.batches({dataset!r:.80}): give a dataset with __len__ and __getitem__, or one that "
            "can be iterated"
        )
    return not hasattr(dataset, "__getitem__")


def _size(dataset: Any) -> int:
    if not hasattr(dataset, "__len__") or len(dataset) == 0:
        raise Misuse(f"job.batches: {type(dataset).__name__} has no samples (or no __len__)")
    return len(dataset)


def _sizes(global_batch: int, micro_batch: int) -> tuple[int, int]:
    whole = given.whole("job.batches: global_batch", global_batch, 1)
    part = given.whole("job.batches: micro_batch", micro_batch, 1)
    if part > whole:
        raise Misuse(f"job.batches: micro_batch={part} is larger than global_batch={whole}")
    return whole, part

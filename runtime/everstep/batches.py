"""A feed: a dataset cut into global batches and micro-batches, in a fixed endless order."""

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import IterableDataset, default_collate

from everstep import order, validate
from everstep.errors import Misuse
from everstep.feed_rules import Settings
from everstep.stream import Stream
from everstep_contract.feed import Order


class Batches:
    """What `job.batches` returns. It has no position, so that any rank can fetch any micro-batch
    of any step; `feeds.Feeds` has it.
    """

    def __init__(
        self,
        dataset: Any,
        settings: Settings,
        *,
        name: str = "1",
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self.name = name
        self.settings = settings
        self.exact = settings.order.length is not None
        """False: the order is the iterable's own, and resuming skips what was read."""
        self.dataset: Any = dataset if self.exact else Stream(dataset)
        self.size = settings.order.length or 0
        self._order = order.Blocks(
            size=self.size, seed=settings.order.seed, shuffle=settings.order.shuffle
        )
        self._collate = (
            validate.callable_or_none("job.batches: collate", collate) or default_collate
        )

    @property
    def global_batch(self) -> int:
        return self.settings.global_batch

    @property
    def micro_batch(self) -> int:
        return self.settings.micro_batch

    @property
    def seed(self) -> int:
        return self.settings.order.seed

    @property
    def micro_batches(self) -> int:
        """Micro-batches in a global batch; the last may be smaller."""
        return -(-self.global_batch // self.micro_batch)

    def places(self, index: int) -> range:
        """Places of micro-batch `index` in its global batch."""
        first = index * self.micro_batch
        return range(first, min(first + self.micro_batch, self.global_batch))

    def ids(self, first: int, index: int) -> list[int]:
        """Dataset indices of micro-batch `index` of the global batch whose first sample has the
        place `first` in the order.
        """
        places = self.places(index)
        first += places.start
        if not self.exact:
            return list(range(first, first + len(places)))
        return self._order.take(first, len(places))

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


def build_settings(
    dataset: Any,
    *,
    global_batch: int,
    micro_batch: int,
    seed: int = 0,
    shuffle: bool = True,
    fingerprint: str | None = None,
) -> Settings:
    """Raises `Misuse` for what cannot be cut."""
    whole = validate.whole("job.batches: global_batch", global_batch, 1)
    part = validate.whole("job.batches: micro_batch", micro_batch, 1)
    if part > whole:
        raise Misuse(f"job.batches: micro_batch={part} is larger than global_batch={whole}")
    return Settings(
        global_batch=whole,
        micro_batch=part,
        order=Order(
            length=None if _is_stream(dataset) else _size(dataset),
            seed=validate.whole("job.batches: seed", seed),
            shuffle=validate.flag("job.batches: shuffle", shuffle),
            fingerprint=_fingerprint(dataset, fingerprint),
        ),
    )


def _is_stream(dataset: Any) -> bool:
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


def _fingerprint(dataset: Any, given: str | None) -> str | None:
    """The argument, or else the dataset's own attribute `fingerprint`."""
    what = "job.batches: fingerprint"
    if given is None:
        given = getattr(dataset, "fingerprint", None)
        what = f"job.batches: {type(dataset).__name__}.fingerprint"
    return validate.text_or_none(what, given)

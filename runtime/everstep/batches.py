"""A feed: a dataset cut into global batches and micro-batches, in a fixed endless order."""

import hashlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, Subset, default_collate

from everstep import loaders, order, validate
from everstep.data_workers import DataWorkers
from everstep.errors import Misuse
from everstep.feed_rules import Settings
from everstep.fetching import Request, Rhythm, Source, list_coming
from everstep.stream import Stream
from everstep_contract.feed import INDICES, Order


class Batches:
    """What `job.batches` returns. It holds no position, so any rank can fetch any micro-batch of
    any step; `feeds.Feeds` holds the position.
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
        """False: the order is the iterable's own, and a resume skips what was read."""
        made = validate.callable_or_none("job.batches: collate", collate) or default_collate
        if not self.exact:
            dataset = Stream(dataset, settings.order.seed, keep=settings.global_batch)
        self.source = Source(dataset, made)
        self.size = settings.order.length or 0
        self._order, self._order_ahead = (
            order.Blocks(size=self.size, seed=settings.order.seed, shuffle=settings.order.shuffle)
            for _ in range(2)
        )
        self._rhythm = Rhythm()
        self._workers: DataWorkers | None = None

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
        return self._ids(self._order, first, index)

    def _ids(self, blocks: order.Blocks, first: int, index: int) -> list[int]:
        places = self.places(index)
        first += places.start
        if not self.exact:
            return list(range(first, first + len(places)))
        return blocks.take(first, len(places))

    def pass_ids(self, index: int) -> list[int]:
        """Dataset indices of micro-batch `index` of one plain pass over the data, in order."""
        first = index * self.micro_batch
        return list(range(first, min(first + self.micro_batch, self.size)))

    @property
    def pass_micro_batches(self) -> int:
        if not self.exact:
            raise Misuse("job.evaluate: needs a dataset with __len__ and __getitem__")
        return -(-self.size // self.micro_batch)

    def start_workers(self, count: int, note: Callable[[str], None]) -> None:
        """Start data workers, which fetch ahead from now on. Raises `Misuse` if
        they cannot serve the dataset.
        """
        if count == 0:
            return
        if not self.exact:
            raise Misuse(
                f"job.batches: workers={count} needs a dataset with __len__ and __getitem__; one that can "
                "only be iterated is read in the rank's own process: set workers=0"
            )
        self._workers = DataWorkers(self.source, count, feed=self.name, note=note)
        weakref.finalize(self, self._workers.close)

    @property
    def fetches_ahead(self) -> bool:
        return self._workers is not None

    def begin_loop(self, step: int) -> None:
        """Begin a loop over this feed in `step`."""
        self._rhythm.begin_loop(step)

    def expect(self, first: int, left: Sequence[int], share: Sequence[int], until: int) -> None:
        """Announce what this rank will ask for: first the micro-batches `left` in the current loop,
        whose first sample is at place `first`; then its `share` of each loop up to step `until`.
        """
        if self._workers:
            coming = list_coming(self._rhythm, [*left], share, until)
            self._workers.expect(self._list_requests(first, coming))

    def _list_requests(
        self, first: int, coming: Iterable[tuple[int, int, int]]
    ) -> Iterator[Request]:
        step, every = self._rhythm.step, self._rhythm.every
        for draw, loop, index in coming:
            ids = self._ids(self._order_ahead, first + draw * self.global_batch, index)
            yield self._request(step + draw * every, loop, index, ids)

    def _request(self, step: int, loop: int, index: int, ids: Sequence[int]) -> Request:
        return Request(seed=("micro-batch", self.seed, step, index), ids=tuple(ids), loop=loop)

    def request(self, first: int, index: int) -> Request:
        """Build the request for micro-batch `index` of the current loop."""
        return self._request(self._rhythm.step, self._rhythm.loop, index, self.ids(first, index))

    def evaluation(self, share: Sequence[int]) -> Iterator[Request]:
        """Begin an evaluation of the micro-batches in `share` of one plain pass over the data. Yield
        their requests.
        """
        if self._workers:
            self._workers.expect(self._list_of_pass(share))
        return self._list_of_pass(share)

    def _list_of_pass(self, share: Sequence[int]) -> Iterator[Request]:
        for index in share:
            ids = tuple(self.pass_ids(index))
            yield Request(seed=("evaluate", self.seed, index), ids=ids)

    def comes_as_usual(self, request: Request) -> bool:
        """Whether a data worker fetches this one, if there are any. If none does, this rank fetches it itself,
        and how long the others' batches took says nothing about that.
        """
        return self._workers is None or self._workers.has(request)

    def take(self, request: Request) -> Any:
        """Return the batch. Its random numbers depend on the request alone,
        whichever process fetches it.
        """
        return self._workers.take(request) if self._workers else self.source.fetch(request)


def build_settings(
    dataset: Any,
    *,
    global_batch: int,
    micro_batch: int,
    seed: int = 0,
    shuffle: bool = True,
    fingerprint: str | None = None,
) -> Settings:
    """Check the arguments and the dataset. Raises `Misuse`."""
    loaders.refuse(dataset)
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
    """Whether the dataset can only be iterated."""
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
    """The argument, or else the dataset's own attribute `fingerprint`, or that of a part of a dataset."""
    what = "job.batches: fingerprint"
    if given is None:
        given = getattr(dataset, "fingerprint", None)
        what = f"job.batches: {type(dataset).__name__}.fingerprint"
    found = validate.text_or_none(what, given)
    return _fingerprint_part(dataset) if found is None else found


def _fingerprint_part(dataset: Any) -> str | None:
    """A digest of which samples torch's `Subset` has: a random split may be another one on each rank, and at
    each start. None: it is none, or its indices are no numbers.
    """
    hasher = hashlib.blake2b(digest_size=8)
    part = dataset
    while isinstance(part, Subset):
        try:
            hasher.update(np.asarray(part.indices, np.int64).tobytes())
        except (TypeError, ValueError, OverflowError):
            return None
        part = part.dataset
    return f"{INDICES}{hasher.hexdigest()}" if part is not dataset else None

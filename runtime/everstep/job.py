"""What `main` is given: the API of a training script."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from everstep import boundary, given, randomness, rewind, shares
from everstep.errors import Misuse
from everstep.feed import Batches
from everstep.session import Session
from everstep.step import Step
from everstep_contract.position import Phase, Where


class Job:
    """One worker's view of the job.

    Everything collective happens inside `steps`, `Step.batches` and `sum`.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._step: Step | None = None
        self._outside = Where.STARTUP
        self._final: tuple[Any, ...] | None = None

    @property
    def device(self) -> torch.device:
        """This rank's device: `cuda:n`, or the CPU."""
        return self._session.device

    @property
    def rank(self) -> int:
        return self._session.start.rank

    @property
    def world_size(self) -> int:
        return self._session.start.world

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0: the one to print."""
        return self.rank == 0

    def track(self, **objects: Any) -> None:
        """Name what is saved; if there is a checkpoint, load it into them, here and now.

        Takes modules (not wrapped), optimizers, schedules, scalers, an EMA copy, tensors, and
        whatever has `state_dict` and `load_state_dict`. Random states and the data's position are
        saved without being named.

        Raises:
            Misuse: the object cannot be tracked, or training has begun.
            StateError: the checkpoint does not fit.
        """
        if self._session.settled:
            raise Misuse("job.track comes before job.steps")
        self._session.track(objects)

    def batches(
        self,
        dataset: Any,
        *,
        global_batch: int,
        micro_batch: int,
        seed: int | None = None,
        shuffle: bool = True,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> Batches:
        """Cut a dataset into global batches of `global_batch` samples, fetched `micro_batch` at a
        time.

        Which samples form a step depends on the seed (default: that of `everstep.run`) and the step
        alone. Augment inside the dataset: torch's, numpy's and Python's random numbers are set
        there for each micro-batch. `collate` takes the list of samples; default: torch's
        `default_collate`.

        A dataset that can only be iterated is resumed by skipping what was read; its order is its
        own, so the run is not exact, and a note says so.
        """
        data = Batches(
            dataset,
            global_batch=global_batch,
            micro_batch=micro_batch,
            seed=self._session.seed if seed is None else given.whole("job.batches: seed", seed),
            shuffle=shuffle,
            collate=collate,
        )
        if not data.exact:
            self._session.findings.notes.append(
                f"{type(dataset).__name__} can only be iterated: resumable, not exact"
            )
        return data

    def steps(self, until: int) -> Iterator[Step]:
        """The steps from where the job stands to `until`; between two of them lies the boundary."""
        session, until = self._session, given.whole("job.steps: until", until, 1)
        if session.settled:
            raise Misuse("job.steps is called once")
        if not session.tracked.objects:
            raise Misuse(
                "job.steps: nothing is tracked; call job.track(model=…, optimizer=…) first"
            )
        session.settle(until)
        first = True
        while session.applied < until:
            if session.broken:
                session.park(session.applied, why="the epoch ended")
            yield self._begin(session.applied + 1, first)
            assert self._step is not None
            boundary.cross(session, self._step)
            self._step, first = None, False
        self._outside, self._final = Where.PAUSE, rewind.fingerprint(session.tracked)
        session.meter.enter(Where.PAUSE, category="pause")

    def evaluate(self, data: Batches) -> Iterator[Any]:
        """This rank's share of one pass over `data`, in order, without gradients; combine with
        `job.sum`.

        Inside a step it marks the step as applied, so it comes after everything that changes the
        state.
        """
        if not isinstance(data, Batches):
            raise Misuse(f"job.evaluate({type(data).__name__}): it takes what job.batches returned")
        start = self._session.start
        share = shares.share(start.rank, start.world, data.pass_micro_batches)
        with self._aside(Where.EVALUATE, "evaluate"):
            before = randomness.capture()
            try:
                with torch.no_grad():
                    for index in share:
                        self._park_if_broken()
                        randomness.seed_all("evaluate", data.seed, index)
                        yield data.fetch(data.pass_ids(index))
            finally:
                randomness.restore(before)

    @contextmanager
    def pause(self, name: str, *, limit: float = 0.0) -> Iterator[None]:
        """Bracket something slow (an export) so that it is not taken for a hang; `limit` in
        seconds.

        Inside a step it marks the step as applied, so it comes after everything that changes the
        state.
        """
        limit = given.number(f"job.pause({name!r}): limit", limit, "a limit in seconds")
        with self._aside(Where.PAUSE, "pause", limit):
            self._park_if_broken()
            yield

    def sum(self, *values: float) -> tuple[float, ...]:
        """Each value summed over all ranks, in float64.

        Every rank must call it, with as many values.
        """
        session = self._session
        require_numbers(values)
        with self._aside(Where.EVALUATE, "evaluate"):
            self._park_if_broken()
            numbers = torch.tensor(values, dtype=torch.float64, device=session.device)
            with session.meter.charging("wait", waiting=True):
                complete = session.group.wait([session.group.all_reduce(numbers)])
            if not complete:
                session.park(
                    session.applied, sound=self.sound(), why="job.sum: a collective failed"
                )
            return tuple(numbers.tolist())

    def _begin(self, number: int, first: bool) -> Step:
        """A first step compiles, allocates and connects: it counts as start-up."""
        where, category = (Where.STARTUP, "startup") if first else (Where.STEP, "step")
        self._session.meter.enter(where, category=category, phase=Phase.COMPUTING, reduction=0)
        self._step = Step(self._session, number)
        return self._step

    @contextmanager
    def _aside(self, where: Where, category: str, limit: float = 0.0) -> Iterator[None]:
        if self._step is not None:
            boundary.mark_applied(self._session, self._step)
        self._session.meter.enter(where, category=category, limit=limit)
        try:
            yield
        finally:
            back = Where.STEP if self._step is not None else self._outside
            self._session.meter.enter(back, category=back.name.lower())

    def _park_if_broken(self) -> None:
        if self._session.broken:
            self._session.park(self._session.applied, sound=self.sound(), why="the epoch ended")

    def finished(self) -> bool:
        """Whether `until` is reached; the last checkpoint is staged then."""
        return self._final is not None

    def sound(self) -> bool:
        """Whether the state is still that of the last step applied."""
        mark = self._step.marked if self._step is not None else self._final
        return mark is not None and rewind.fingerprint(self._session.tracked) == mark


def require_numbers(values: tuple[Any, ...]) -> None:
    """Tensors of one number will do; raises `Misuse` for what is none."""
    for value in values:
        if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
            raise Misuse(f"job.sum({value!r}): it adds numbers; give sum, count as two numbers")

"""The API of a training script: `main` gets a `Job`."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch

from everstep import boundary, joining, randomness, validate
from everstep.asides import Asides
from everstep.batches import Batches, build_settings
from everstep.compiling import CompilerWatch
from everstep.errors import Misuse
from everstep.evaluations import Evaluations
from everstep.feeds import ON_CHANGE
from everstep.session import Session
from everstep.step import Step
from everstep.step_state import StepState
from everstep_contract.position import Phase, Where

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Job:
    """A training script's view of its job. Ranks communicate only inside `steps`, `Step.batches` and `sum`."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._asides = Asides(session)
        self._evaluations = Evaluations(session.note)
        self._compiler = CompilerWatch(session.meter.compiles)

    @property
    def device(self) -> torch.device:
        """This rank's device: `cuda:n`, or the CPU."""
        return self._session.device

    @property
    def rank(self) -> int:
        return self._session.membership.rank

    @property
    def world_size(self) -> int:
        """The number of ranks. Until its first step, a rank that joins a running job sees the
        number with which all ranks started, as the other ranks did: settings computed from it, such
        as `global_batch`, are then the same on all ranks.
        """
        return self._session.membership.script_world

    @property
    def mesh(self) -> "DeviceMesh":
        """torch's mesh of this rank's unit, with the dimensions "shard" and "tensor"
        (`everstep run --mesh shard=2,tensor=2`). It is 1 × 1 if each rank holds the whole model.

        Shard the model over it before `job.track`: `fully_shard(layer, mesh=job.mesh["shard"])`,
        `parallelize_module(model, job.mesh["tensor"], plan)`. Everstep itself sums over the units.
        The mesh lasts as long as the process, whatever happens to other units. If each rank holds
        the whole model, a job that uses `job.mesh` restarts from a save whenever a rank is lost.
        """
        return self._session.find_mesh()

    @property
    def epoch(self) -> int:
        """The number of the current membership; it rises whenever ranks are lost or join."""
        return self._session.epoch

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, the one that should print."""
        return self.rank == 0

    def track(self, **objects: Any) -> None:
        """Name the objects that a checkpoint holds, and load them if there is a checkpoint to resume from.

        Accepts modules (not wrapped), optimizers, schedules, scalers, EMA copies, tensors, and
        every object with `state_dict` and `load_state_dict`. Random states and the position in the
        data are saved without being named. Track every optimizer of tracked parameters: otherwise
        its `step` raises `Misuse`, because it would get no gradients or lose its state.

        Raises:
            Misuse: the object cannot be tracked, or training has begun.
            StateError: the checkpoint lacks the object, or its state does not fit.
        """
        if self._session.settled:
            raise Misuse("job.track comes before job.steps")
        self._session.track(objects)

    def track_local(self, **objects: Any) -> None:
        """Name objects whose state belongs to each rank alone: a replay buffer, an environment,
        statistics of the samples that this rank has seen. Load them if there is a checkpoint to
        resume from.

        Accepts what `track` accepts. Each rank saves its own state, and nothing is compared. A
        resume gives the state back to the rank of the same number (ranks follow slot order), if the
        checkpoint was made by as many ranks. In these cases the state begins as the script made it,
        and a note in the status reports that: on a rank that replaces a lost one in place; after
        the number of ranks has changed; on all ranks but one after a save that one rank made
        because the others were lost; under a name that the checkpoint does not have. A note also
        names state in the checkpoint that is no longer tracked: it is ignored. Change the state
        after the loop over `step.batches`, because a step that cannot be applied is taken again.
        Keep it small, because it is copied at the boundary.

        Raises:
            Misuse: the object cannot be tracked, or training has begun.
            StateError: the state in the checkpoint does not fit.
        """
        if self._session.settled:
            raise Misuse("job.track_local comes before job.steps")
        self._session.track_local(objects)

    def batches(
        self,
        dataset: Any,
        *,
        global_batch: int,
        micro_batch: int,
        seed: int | None = None,
        shuffle: bool = True,
        collate: Callable[[list[Any]], Any] | None = None,
        name: str | None = None,
        fingerprint: str | None = None,
        on_change: Literal["Refuse", "Continue"] = "Refuse",
        workers: int = 0,
    ) -> Batches:
        """Make a feed: a dataset cut into global batches of `global_batch` samples, fetched
        `micro_batch` samples at a time.

        The order is perm(seed, 0), perm(seed, 1), …: each pass over the data is complete, and a
        batch may span two passes. A step that draws from the feed takes the samples after the last
        one used; a step that does not draw takes none. The checkpoint holds how far the feed was
        used, so a run with another `global_batch` continues with the next unused sample.

        Args:
            dataset: has `__len__` and `__getitem__` (or `__getitems__`). It is the same on all ranks;
                nothing may divide it by rank (`split_by_node`). A dataset that can only be
                iterated is resumed by skipping the samples that were read. Its order is its own, so
                the run is not exact, and a note reports that. Each rank reads all of it and keeps
                the samples of one global batch in memory, so each sample has to be a new object.
            global_batch: samples of one step, over all ranks.
            micro_batch: samples fetched and computed at a time, at most `global_batch`; the last
                micro-batch of a step may have fewer.
            seed: sets the order and the random numbers of each micro-batch. None: the seed of
                `everstep.run`.
            shuffle: False: each pass has the order of the dataset. So it has if the dataset can only
                be iterated.
            collate: makes a batch from a list of samples. None: torch's `default_collate`.
            name: name of the feed in the checkpoint. None: its number among the script's feeds
                without a name.
            fingerprint: a text that changes with the content of the dataset. None: the dataset's
                attribute `fingerprint`, if it has one; of torch's `Subset` a digest of its indices.
            on_change: what to do if length, seed, shuffle or fingerprint differ from the
                checkpoint's. "Refuse": the job ends. "Continue": training continues with the new
                order, and `everstep verify` names the step.
            workers: number of data workers, the processes of this rank that fetch ahead. 0: the
                rank fetches each micro-batch when the loop asks for it. The batches are the same.
                Each data worker is a new process that imports the script as a module and gets a
                pickle of `dataset` and `collate`.

        Augment inside the dataset: torch's, numpy's and Python's random numbers are
        set there for each micro-batch.

        Raises:
            Misuse: an argument cannot be used, two feeds have the same name, or data workers cannot
                get the dataset.
            StateError: the feed cannot exactly continue the checkpoint's feed of this name.
        """
        session = self._session
        validate.choice("job.batches: on_change", on_change, ON_CHANGE)
        workers = validate.whole("job.batches: workers", workers, 0)
        settings = build_settings(
            dataset,
            global_batch=global_batch,
            micro_batch=micro_batch,
            seed=session.seed if seed is None else seed,
            shuffle=shuffle,
            fingerprint=fingerprint,
        )
        name = validate.text_or_none("job.batches: name", name)
        with session.feeds.all_or_none():
            name = session.feeds.choose_name(name)
            data = Batches(dataset, settings, name=name, collate=collate)
            session.feeds.add(data, on_change=on_change)
            data.start_workers(workers, session.note_own)
        if not data.exact:
            session.note(
                f"{type(dataset).__name__} can only be iterated: resumable, not exact. It is read in its own order, "
                "whatever shuffle= says"
            )
        return data

    def steps(self, until: int) -> Iterator[Step]:
        """Yield the steps from the job's current step to `until`; between two steps is a boundary.

        Raises:
            Misuse: called twice, nothing is tracked, or a step's body did not end its inner loop.
            StateError: the checkpoint does not fit, or something tracked cannot be stored.
        """
        session, until = self._session, validate.whole("job.steps: until", until, 1)
        if session.settled:
            raise Misuse(
                "job.steps is called once, and was called again: train all steps in one loop"
            )
        if not session.tracked.objects:
            raise Misuse(
                "job.steps: nothing is tracked; call job.track(model=…, optimizer=…) first"
            )
        self._evaluations.end_all()  # those that the script has begun before and not ended
        session.settle(until)
        if session.start.join:
            joining.take_state(session)
        starting = 2 if session.start.join else 1
        while not session.reached_end:
            if session.broken:
                session.park(session.applied, why="the epoch ended")
            state = self._begin(session.applied + 1, starting > 0)
            yield Step(state)
            self._evaluations.end_all()
            self._asides.end_all()
            boundary.cross(session, state)
            session.step, starting = None, starting - 1
            # The two refer to each other, and hold copies of buffers on the device.
            state.loop = None
        self._asides.outside = Where.PAUSE
        session.finish()
        session.meter.enter(Where.PAUSE, category="pause")

    def save(self, pin: str | None = None) -> None:
        """Take a checkpoint at the end of the current step, in addition to those
        that the job's settings request.

        Every rank must call it in the same step, because each saves its part; if only some have, all
        save the next step instead, and a note reports that. It returns at once: the copy is made during
        the next step, and committed in the background.

        Args:
            pin: name under which the checkpoint is kept, whatever the number of checkpoints to
                keep, until `everstep checkpoints RUN --unpin NAME`: lower-case letters, digits and
                '-'. If this save fails, the next step that can be saved is pinned instead. A run
                uses a name only once: if it is used again, it stays with its first checkpoint, and
                a note reports that.

        Raises:
            Misuse: called outside of a step, or `pin` is not such a name.
        """
        pin = validate.pin_or_none("job.save: pin", pin)
        if self._session.step is None:
            raise Misuse("job.save belongs inside the loop over job.steps: it saves a step's end")
        self._session.saves.asked.ask(self._session.step.number, pin)

    def stop(self) -> None:
        """End the training with the current step, as if `until` were this step: early stopping.

        Every rank must call it in the same step, for example because of a result of `job.sum`, which
        is the same everywhere. The body goes on, and the loop over `job.steps` ends after it. The run
        is then over, also for a later start of it; `everstep fork` begins a new run from its last
        checkpoint.

        Raises:
            Misuse: called outside of a step.
        """
        if self._session.step is None:
            raise Misuse("job.stop belongs inside the loop over job.steps: it ends the training")
        self._session.stop(self._session.step.number)

    def evaluate(self, data: Batches) -> Iterator[Any]:
        """Yield this rank's share of one pass over `data`, in order and without gradients;
        `job.sum` adds up the results. The ranks of a unit get the same share. Call `model.eval()`
        before: buffers that forward changes (BatchNorm) are put back at the end.

        Inside a step it marks the step as applied, so call it after
        everything that changes the state. The time limit of a step applies to each batch. At the
        end of the step the evaluation ends, too, whether or not all its batches were taken.

        Raises:
            Misuse: `data` is not a feed, or can only be iterated; or a further batch is taken in a
                later step. At the end of the step: forward has changed a buffer that is too large
                to be put back.
        """
        if not isinstance(data, Batches):
            raise Misuse(f"job.evaluate({type(data).__name__}): it takes what job.batches returned")
        micro_batches = data.pass_micro_batches
        with self._asides.begin(Where.EVALUATE, "evaluate") as own:
            share, even = self._session.membership.plan_evaluation(micro_batches)
            if not even:
                self._asides.note_uneven(own)
            try:
                with self._evaluations.begin(self._session.list_buffers()):
                    for request in data.evaluation(share):
                        self._park_if_broken()
                        with self._session.meter.fetching():
                            batch = data.take(request)
                        self._asides.enter_innermost()  # each batch has the whole time limit
                        randomness.seed_all(*request.seed)
                        yield batch
                        self._asides.require_open(own)
            finally:
                self._asides.stay_apart(own)

    @contextmanager
    def pause(self, name: str, *, limit: float = 0.0) -> Iterator[None]:
        """Bracket something slow, such as an export, so that it does not count as a hang.

        Inside a step it marks the step as applied, so call it after
        everything that changes the state.

        Args:
            name: for messages.
            limit: seconds; 0: the limit of a step.
        """
        limit = validate.number(f"job.pause({name!r}): limit", limit, "a limit in seconds")
        with self._asides.begin(Where.PAUSE, "pause", limit):
            self._park_if_broken()
            yield

    def sum(self, *values: float) -> tuple[float, ...]:
        """Sum each value over all ranks, in float64. If several ranks form a unit, only the
        first rank of each unit counts.

        Every rank must call it the same number of times, with the same number of values. Inside a
        step it marks the step as applied.

        Raises:
            Misuse: a value is not a number; another rank is seen not to sum, or to give another number
                of values; the script is not in `steps` yet: a rank that joins
                the running job would be alone with its sum; or it is within an evaluation of which
                some ranks have more batches than others.
        """
        session = self._session
        require_numbers(values)
        if not session.settled:
            raise Misuse(
                "job.sum before job.steps: a rank that joins the job later would be alone with its sum and "
                "get another result. Compute the value on every rank, or call job.sum within the loop over job.steps"
            )
        self._asides.require_even()
        with self._asides.begin(Where.EVALUATE, "evaluate"):
            self._park_if_broken()
            plain = [v.item() if hasattr(v, "item") else float(v) for v in values]
            numbers = torch.tensor(plain, dtype=torch.float64, device="cpu")
            membership = session.membership
            if membership.mesh.place_of(membership.rank) != 0:
                numbers.zero_()
            with session.meter.charging("wait", waiting=True):
                total = membership.group.add_up(numbers)
            if total is None:
                sound = session.is_sound()
                session.park(session.applied, sound=sound, why="job.sum: a collective failed")
            return tuple(total.tolist())

    def _begin(self, number: int, starting: bool) -> StepState:
        """Begin a step. Steps count as start-up up to the first one that this rank computes,
        because that one compiles, allocates and connects. For a newcomer it is the second step: the
        members compute its share of the first.
        """
        self._compiler.attach()
        self._asides.forget()  # such as an evaluation from before the first step that has not ended
        where, category = (Where.STARTUP, "startup") if starting else (Where.STEP, "step")
        self._session.meter.enter(where, category=category, phase=Phase.COMPUTING, reduction=0)
        self._session.reducer.begin_step()
        self._session.step = StepState(self._session, number)
        return self._session.step

    def _park_if_broken(self) -> None:
        session = self._session
        if session.broken:
            session.park(session.applied, sound=session.is_sound(), why="the epoch ended")


def require_numbers(values: tuple[Any, ...]) -> None:
    """Check that the values are numbers; tensors and arrays of one number count, too. Raises `Misuse`."""
    for value in values:
        text = isinstance(value, (str, bytes)) or not hasattr(value, "__float__")
        if text or math.prod(getattr(value, "shape", ())) != 1:
            raise Misuse(
                f"job.sum({value!r}): it adds numbers; give each as its own argument, as in job.sum(loss, count)"
            )

"""The sum that ends a reduction, of a few kilobytes: a rank gets it only if every rank has
completed all sums before it.

gloo calls back when an operation has ended, in its only thread, which then begins the next
operation. The callback of a rank's last bucket sends the rank's numbers at once: no main thread has
to wake up first, which would need a core that another rank may occupy. The callback of a failed
bucket cuts the group instead.

The sums of `job.sum` go the same way, without buckets. Each message begins with what it is of, so a
script that calls `job.sum` on some ranks only is told so.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from everstep.errors import Misuse
from everstep.mesh import LARGEST, Mesh

Look = Callable[[], None]
"""Called ten times a second while a rank waits for a sum."""
Ends = Callable[[Any], bool]
"""Waits for an operation. Returns whether it is complete."""
Note = Callable[[int], None]
"""Called with the number of buckets that are complete, from any thread."""
OF_STEP, OF_SCRIPT, THE_END = b"of step ", b"job.sum ", b"the end "
"""What a rank sums, as the first eight bytes of its message; or that its script has ended."""


def ignore(complete: int) -> None:
    """A `Note` that does nothing."""


class CompleteSums:
    """Counts the sums of one reduction that are complete on this rank, from their launch on, in gloo's
    thread. Each torch group has a thread that calls back.

    Args:
        cut: makes every operation of the group fail; from any thread.
    """

    def __init__(self, cut: Callable[[], None], note: Note = ignore) -> None:
        self.cut, self.note = cut, note
        self._counting = threading.Lock()
        self._complete = 0
        self._all: int | None = None
        """How many there are; None: not all are launched."""
        self._then: Callable[[], None] = lambda: None

    def follow(self, work: Any) -> None:
        """Count this operation once it is complete."""
        work.get_future().add_done_callback(self._count)

    def _count(self, over: Any) -> None:
        try:
            over.value()
        except RuntimeError:
            self.cut()
            return
        with self._counting:
            self._complete += 1
            complete = self._complete
            self.note(complete)
            are_all = complete == self._all
        if are_all:
            self._then()

    def when_all(self, count: int, then: Callable[[], None]) -> None:
        """Call `then` once so many are complete: in gloo's thread, or here if they are complete already."""
        with self._counting:
            self._all, self._then = count, then
            are_all = self._complete == count
        if are_all:
            then()


class LastSum:
    """The last sum of one reduction.

    Args:
        buckets: the operations before it.
        sums: counts these operations, unless the main thread waits for them. It is not kept here: it
            refers to this object, and to the group.
    """

    def __init__(self, buckets: Sequence[Any], sums: CompleteSums) -> None:
        self.buckets, self._cut, self.note = buckets, sums.cut, sums.note
        self.late = False
        """The main thread launches it, once it has seen that all sums before it are complete."""
        self.own = False
        """All sums before it are complete on this rank."""

    def follow(self, sums: CompleteSums) -> None:
        """Have gloo's thread call `complete` after the last bucket; if all buckets are
        complete already, call it here.
        """
        sums.when_all(len(self.buckets), self.complete)

    def complete(self) -> None:
        """Called when every bucket's sum is complete on this rank."""
        self.own = True

    def launch(self, all_reduce: Callable[[torch.Tensor], Any]) -> None:
        """Launch what the group has to do for it, after the buckets."""

    def end(self, ends: Ends, look: Look) -> torch.Tensor | None:
        """Wait for the sum over all ranks, [n], which is the same on each. None: it is not complete."""
        raise NotImplementedError

    def _end_buckets(self, ends: Ends) -> bool:
        """Wait for all buckets, even after one has failed, because the next sum uses the same memory."""
        complete = [ends(work) for work in self.buckets]
        self.buckets = ()  # a reference to an operation keeps the group's sockets open
        return all(complete)


class DirectSum(LastSum):
    """Each rank sends its numbers to each other rank.

    Args:
        numbers: this rank's, [n] float64.
        what: `OF_STEP` or `OF_SCRIPT`.
    """

    def __init__(
        self,
        buckets: Sequence[Any],
        sums: CompleteSums,
        numbers: torch.Tensor,
        rank: int,
        mesh: Mesh,
        what: bytes = OF_STEP,
    ) -> None:
        super().__init__(buckets, sums)
        self._what, self._body = what, what + numbers.numpy().tobytes()
        self._rank, self._mesh = rank, mesh
        self.sent = threading.Event()
        """This rank's message is sent to all: whoever sends the next one has to wait for that."""

    def complete(self) -> None:
        super().complete()
        self._mesh.send(self._body)
        self.sent.set()

    def end(self, ends: Ends, look: Look) -> torch.Tensor | None:
        """Raises `Misuse` if the ranks differ in what they sum, or in how many numbers they send."""
        found = self._mesh.receive(look, self._require_same)
        if found is None:
            self._cut()  # else a bucket might never end
        if not self._end_buckets(ends) or found is None:
            return None
        found[self._rank] = self._body
        sizes = {rank: len(body) // 8 - 1 for rank, body in sorted(found.items())}
        if len(set(sizes.values())) > 1:
            raise Misuse(_SIZES[self._what].format(sizes=sizes))
        rows = [np.frombuffer(found[rank], np.float64, offset=len(self._what)) for rank in sizes]
        return torch.from_numpy(functools.reduce(np.add, rows))

    def _require_same(self, rank: int, body: bytes) -> None:
        """A rank that sums something else waits for this one, as this one would for it."""
        theirs = body[: len(self._what)]
        if theirs == THE_END:
            if self._what == OF_STEP:
                return  # the agents tell after which steps the scripts have ended
            raise Misuse(
                f"rank {self._rank} is in job.sum, and the script of rank {rank} has ended: every rank must call "
                f"job.sum the same number of times. {_FIX}"
            )
        if theirs != self._what:
            script, step = (rank, self._rank) if theirs == OF_SCRIPT else (self._rank, rank)
            raise Misuse(
                f"rank {script} is in job.sum, and rank {step} sums the gradients of a step: every rank must call "
                f"job.sum the same number of times. {_FIX}"
            )


_FIX = "Call it outside of any condition that differs between ranks, such as job.is_first"
_SIZES = {
    OF_STEP: "the ranks sent different numbers of values for one step (by rank: {sizes}); all ranks must train the "
    "same model, and draw from the same feed with the same global_batch and micro_batch",
    OF_SCRIPT: "job.sum: the ranks gave different numbers of values (by rank: {sizes}); give as many on all ranks",
}


class QueuedSum(LastSum):
    """An all-reduce, for many ranks or many numbers. It is queued in gloo's thread after the
    buckets, together with a word that each rank sets once its buckets are complete.
    """

    def __init__(
        self,
        buckets: Sequence[Any],
        sums: CompleteSums,
        numbers: torch.Tensor,
        world: int,
    ) -> None:
        super().__init__(buckets, sums)
        self._world = world
        self._sum = torch.cat([numbers, numbers.new_zeros(1)])
        self._word = self._sum.numpy()[-1:]
        self._work: Any = None

    def complete(self) -> None:
        super().complete()
        self._word.fill(1.0)

    def launch(self, all_reduce: Callable[[torch.Tensor], Any]) -> None:
        self._work = all_reduce(self._sum)

    def end(self, ends: Ends, look: Look) -> torch.Tensor | None:
        complete = self._work is not None and ends(self._work)
        if not self._end_buckets(ends) or not complete or self._word.item() != self._world:
            return None
        return self._sum[:-1]


def fits(numbers: torch.Tensor) -> bool:
    """Whether a `DirectSum` may be used."""
    return len(OF_STEP) + numbers.numel() * numbers.element_size() <= LARGEST

"""The ranks of one epoch as one process group, and how a rank leaves it when it breaks
(`forming.py` forms it). A rank's unit outlives it.

gloo has no abort. A cut shuts duplicates of the group's sockets down (`group_sockets.py`): every
operation of every neighbour then fails within a millisecond. An operation that has not returned
shortly after a cut is abandoned with its buffer.
"""

import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch._C._distributed_c10d import ErrorType

from everstep import device, group_sockets
from everstep.last_sum import (
    OF_SCRIPT,
    THE_END,
    CompleteSums,
    DirectSum,
    LastSum,
    Look,
    Note,
    QueuedSum,
    fits,
    ignore,
)
from everstep.mesh import Mesh
from everstep.unit import Over, Squares, Unit

LOOK = timedelta(milliseconds=100)
"""How often a waiting rank checks whether it was cut."""
ABANDON_SECONDS = 0.05
"""How long after a cut an operation may still return."""
LEAVE_LOOK_SECONDS = 0.001
"""Interval at which a rank checks whether a group's operations have returned after a cut."""
NCCL_LOOK_SECONDS = 0.0002
"""Interval at which a rank checks an operation on a device."""


TellMoved = Callable[[int | None], None]
"""Called ten times a second while this rank waits for a sum, with the number of bytes that the
group's connections have carried so far; None: not known.
"""


def tell_nobody(moved: int | None) -> None:
    pass


class Group(Protocol):
    rank: int
    world: int
    unit: Unit | None
    """This rank's unit; None: each rank is a unit."""
    abandoned: bool
    """An operation did not return after a cut: it may still write into its tensors."""
    complete_buckets: int
    """So many buckets of the current reduction, from the first on, are complete on all its ranks from a
    former group.
    """

    def begin_sums(self, note: Note) -> None:
        """Begin the sums of a reduction. `note` is called with the number of those that are complete on
        this rank; from any thread.
        """

    def all_reduce(self, tensor: torch.Tensor, over: Over | None = None) -> Any:
        """Start a sum in place, over all ranks or those that `over` names. None: the group is broken."""

    def start_last(self, works: Sequence[Any], numbers: torch.Tensor) -> Any:
        """Start the sum of a few kilobytes that is complete only if `works`, the sums of this reduction,
        are complete on every rank. The result's attribute `own`: they are complete on this rank. None: the
        group is broken.
        """

    def wait(self, works: Sequence[Any]) -> bool:
        """Wait for all, and return whether they are complete. False: this rank must leave the group."""

    def end_last(self, last: Any, look: TellMoved = tell_nobody) -> torch.Tensor | None:
        """Wait for the sum that `start_last` has started, and return it. None: this rank must leave the group."""

    def add_up(self, numbers: torch.Tensor) -> torch.Tensor | None:
        """Sum a few numbers outside of a step, [n] float64 on the CPU; the result is the same on all ranks.
        None: this rank must leave the group. Raises `Misuse` if another rank is seen to sum something else.
        """

    def tell_end(self) -> None:
        """Tell the other ranks that this one's script has ended. One of them may wait for it in `add_up`."""

    def add_squares(self, own: Squares) -> float | None:
        """Sum over the unit; the same result on all its ranks. None: a rank of the unit is lost."""

    def cut(self) -> None:
        """Make every operation between units fail, here and at the neighbours. From any thread; may be repeated."""

    def cut_unit(self) -> None:
        """Make every operation within the unit fail, too: this rank computes no more."""

    def wait_cut(self) -> None:
        """Wait until a device does nothing more for this group, which was cut. Raises `RuntimeError`."""

    def drop(self) -> None:
        """Release what a group that was cut holds, once its operations have returned."""


class LocalGroup:
    """A group of one rank: every sum is complete at once.

    Args:
        unit: the unit of a newcomer, which is held until the first epoch that it belongs to.
    """

    rank, world, abandoned = 0, 1, False

    def __init__(self, unit: Unit | None = None) -> None:
        self.unit = unit
        self.complete_buckets = 0
        self._cut = threading.Event()

    def begin_sums(self, note: Note) -> None:
        pass

    def all_reduce(self, tensor: torch.Tensor, over: Over | None = None) -> Any:
        return None if self._cut.is_set() else tensor

    def start_last(self, works: Sequence[Any], numbers: torch.Tensor) -> "_Alone | None":
        return _Alone(numbers) if self.wait(works) and not self._cut.is_set() else None

    def wait(self, works: Sequence[Any]) -> bool:
        return all(work is not None for work in works)

    def end_last(self, last: Any, look: TellMoved = tell_nobody) -> torch.Tensor | None:
        return None if last is None else last.numbers

    def add_up(self, numbers: torch.Tensor) -> torch.Tensor | None:
        return None if self._cut.is_set() else numbers

    def tell_end(self) -> None:
        pass

    def add_squares(self, own: Squares) -> float | None:
        return own.total if self.unit is None else self.unit.add_squares(own)

    def cut(self) -> None:
        self._cut.set()

    def cut_unit(self) -> None:
        _cut_unit(self.unit)

    def wait_cut(self) -> None:
        pass

    def drop(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class _Alone:
    numbers: torch.Tensor
    own: bool = True


class TorchGroup:
    """A torch group over gloo, with NCCL for CUDA tensors.

    Args:
        made: torch's group of all ranks; if each rank is a unit, torch's default group.
        sums: groups of some of the ranks. If one is missing, all ranks sum.
    """

    unit: Unit | None = None

    def __init__(
        self,
        rank: int,
        world: int,
        sockets: Iterable[socket.socket],
        made: Any,
        sums: Mapping[Over, Any] = MappingProxyType({}),
        unit: Unit | None = None,
    ) -> None:
        self.rank, self.world, self.unit = rank, world, unit
        self._sockets, self._sums = list(sockets), dict(sums)
        self.keys: Any = None
        """The rendezvous stores, which torch uses again if the script makes groups of its own."""
        self.mesh: Mesh | None = None
        """The ranks' own connections; None: they have none."""
        self._sent: threading.Event | None = None
        """Gloo's thread has sent this rank's newest message; None: it has sent none. The main thread may
        have those of all others before.
        """
        self._cut_at: float | None = None
        self.abandoned = False
        self.complete_buckets = 0
        self._complete: CompleteSums | None = None
        """Counts the sums of the reduction whose buckets are being launched. It refers to this group, so
        it may not stay here.
        """
        self._group = made
        self._over_nccl = torch.cuda.is_available()
        self._launching = threading.Lock()
        self._look: Look = _look_at_nothing
        self._newest: Any = None
        """The operation that was launched last; gloo's only thread runs them in this order."""

    def begin_sums(self, note: Note) -> None:
        self._complete = CompleteSums(self.cut, note)

    def all_reduce(self, tensor: torch.Tensor, over: Over | None = None) -> Any:
        work = self._start_sum(tensor, over)
        if work is not None and not isinstance(work, _OnDevice):
            self._complete = self._complete or CompleteSums(self.cut)
            self._complete.follow(work)
        return work

    def _start_sum(self, tensor: torch.Tensor, over: Over | None = None) -> Any:
        group = self._group if over is None else self._sums.get(over, self._group)
        work = self._launch(lambda: group.allreduce([tensor]))
        return _OnDevice(work, group) if work is not None and tensor.is_cuda else work

    def start_last(self, works: Sequence[Any], numbers: torch.Tensor) -> LastSum | None:
        sums, self._complete = self._complete or CompleteSums(self.cut), None
        if self._cut_at is not None or any(work is None for work in works):
            self._wait_returned(works)
            return None
        last: LastSum
        if self.mesh is not None and fits(numbers):
            last = DirectSum(works, sums, numbers, self.rank, self.mesh)
            self._sent = last.sent
        else:
            last = QueuedSum(works, sums, numbers, self.world)
        # gloo's thread runs it after the buckets only if they are sums of the same group.
        last.late = _on_device(works) or (self.unit is not None and isinstance(last, QueuedSum))
        if not last.late:
            last.follow(sums)
            last.launch(self._start_sum)
        return last

    def _launch(self, start: Callable[[], Any]) -> Any:
        with self._launching:
            if self._cut_at is not None:
                return None
            try:
                self._newest = start()
            except RuntimeError:  # the error's traceback would keep the group's objects alive
                self.cut()
                return None
            return self._newest

    def wait(self, works: Sequence[Any], note: Note = ignore) -> bool:
        for number, work in enumerate(works, 1):
            if work is None or not self._ends(work):
                self.cut()
                return False
            note(number)
        return True

    def end_last(self, last: Any, look: TellMoved = tell_nobody) -> torch.Tensor | None:
        self._look = lambda: look(self._count_moved())
        try:
            found = self._end_last(last)
        finally:
            # A group that refers to itself would keep its sockets until a garbage collection.
            self._look = _look_at_nothing
        if found is None:
            self.cut()
        return found

    def add_up(self, numbers: torch.Tensor) -> torch.Tensor | None:
        if self.mesh is None or not fits(numbers):
            return numbers if self.wait([self._start_sum(numbers)]) else None
        sums = CompleteSums(self.cut)
        last = DirectSum((), sums, numbers, self.rank, self.mesh, OF_SCRIPT)
        self._wait_sent()
        last.follow(sums)
        return last.end(self._ends, _look_at_nothing)

    def tell_end(self) -> None:
        if self.mesh is not None:
            self._wait_sent()
            self.mesh.send(THE_END)

    def _wait_sent(self) -> None:
        while self._sent is not None and self._cut_at is None:
            if self._sent.wait(LOOK.total_seconds()):
                return

    def _end_last(self, last: Any) -> torch.Tensor | None:
        # NCCL calls back at an operation's launch, so the main thread checks when it is complete.
        if last is not None and last.late:
            note = last.note if _on_device(last.buckets) else ignore
            if self.wait(last.buckets, note):
                last.complete()
                last.launch(self._start_sum)
        found: torch.Tensor | None = last.end(self._ends, self._look) if last is not None else None
        return found

    def _count_moved(self) -> int | None:
        """Count the bytes that the other ranks have received from this one, and this
        one from them. None: not known.
        """
        if self._over_nccl:
            return None
        sockets = [
            *self._sockets,
            *(self.unit.sockets if self.unit is not None else ()),
            *(self.mesh.sockets if self.mesh is not None else ()),
        ]
        known = [count for one in sockets if (count := group_sockets.count_bytes(one)) is not None]
        return sum(known) if known and len(known) == len(sockets) else None

    def cut(self) -> None:
        first = self._cut_at is None
        if first:
            self._cut_at = time.monotonic()
        for duplicate in self._sockets:
            group_sockets.shut_down(duplicate)
        if self.mesh is not None:
            self.mesh.cut()
        if first and self._over_nccl:
            _abort([*self._sums.values(), self._group])

    def wait_cut(self) -> None:
        """Wait for the device, not for the abort. The abort takes longer: it ends the operations at
        once, and then waits half a second for NCCL's threads.
        """
        if not self._over_nccl:
            return
        with self._launching:  # a launch may be in progress
            pass
        device.synchronize()

    def add_squares(self, own: Squares) -> float | None:
        return own.total if self.unit is None else self.unit.add_squares(own)

    def cut_unit(self) -> None:
        _cut_unit(self.unit)

    def drop(self) -> None:
        """Drop the group in a thread of its own: the destructor of torch's group waits for every
        operation, and one may never return.
        """
        left = [self._group, self._newest, self._sums]
        self._group, self._newest, self._sums, self._complete = None, None, {}, None
        threading.Thread(target=left.clear, name="everstep-group-end", daemon=True).start()

    def leave(self) -> bool:
        """Cut. Return whether every operation has returned, so that torch's group may serve another
        epoch. One that hangs would occupy gloo's thread, and all operations of the next epoch would
        wait behind it.
        """
        self.cut()
        with self._launching:
            newest = self._newest
        limit = time.monotonic() + ABANDON_SECONDS
        while newest is not None and not newest.is_completed():
            if time.monotonic() > limit:
                return False
            time.sleep(LEAVE_LOOK_SECONDS)
        return True

    def _returned(self, work: Any) -> bool:
        """Wait for an operation of gloo, and return whether it has succeeded. `wait` raises both
        for a failed operation and at our time limit. If the operation was complete before the wait,
        it has failed; otherwise it may be the time limit.
        """
        while True:
            complete = work.is_completed()
            if self.abandoned and not complete:
                return False  # the next sum uses new memory for all of them
            try:
                work.wait(LOOK)
                return True
            except RuntimeError:
                if complete:
                    return False
            self._look()
            if self._cut_at is not None and time.monotonic() > self._cut_at + ABANDON_SECONDS:
                self.abandoned = True
                return False

    def _wait_returned(self, works: Sequence[Any]) -> None:
        """Wait for those operations of a broken group that were launched: the next sum uses the same
        memory. One that does not return is abandoned.
        """
        for work in works:
            if work is not None:
                self._ends(work)

    def _ends(self, work: Any) -> bool:
        return self._completes(work) if isinstance(work, _OnDevice) else self._returned(work)

    def _completes(self, operation: "_OnDevice") -> bool:
        """Wait for an operation of NCCL, and return whether it has succeeded. NCCL fails an
        operation whose `wait` reaches a time limit, so this polls whether it is complete. An abort
        completes it, too. So it counts only if nothing has failed and, checked last, there was no
        cut.
        """
        looked, work = time.monotonic(), operation.work
        while not work.is_completed():
            if self._cut_at is not None:
                return False  # its memory is free again when the next group is there (`wait_cut`)
            if time.monotonic() > looked + LOOK.total_seconds():
                looked = time.monotonic()
                self._look()
            time.sleep(NCCL_LOOK_SECONDS)
        if _has_failed(operation.group) or self._cut_at is not None:
            return False
        try:
            work.wait()  # orders the script's stream after the sum; does not block
        except RuntimeError:  # the operation knows NCCL's error before the group does
            return False
        return True


def _look_at_nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class _OnDevice:
    """An operation of NCCL, and its group."""

    work: Any
    group: Any


def _cut_unit(unit: Unit | None) -> None:
    if unit is None:
        return
    for duplicate in unit.sockets:
        group_sockets.shut_down(duplicate)
    if torch.cuda.is_available():
        _abort(unit.dimensions.values())


def _abort(groups: Iterable[Any]) -> None:
    """Abort each group in a thread of its own: an abort takes half a second, and may wait for
    another group's operation on the device.
    """

    def abort(group: Any) -> None:
        device.enter()
        group.abort()

    for group in groups:
        name = "everstep-group-abort"
        threading.Thread(target=abort, args=(group,), name=name, daemon=True).start()


def _has_failed(made: Any) -> bool:
    found: bool = made._get_backend(torch.device("cuda")).get_error() != ErrorType.SUCCESS
    return found


def require_no_error(made: Any) -> None:
    """Raises `RuntimeError` if NCCL reports an error for a torch group."""
    if _has_failed(made):
        raise RuntimeError("NCCL has lost a rank while it connected them")


def _on_device(works: Sequence[Any]) -> bool:
    return any(isinstance(work, _OnDevice) for work in works)

"""`everstep.membership.Membership` as a value: each call is made on the product's object, which is
set to that value before the call and read afterwards.

Nothing here waits: a call that would block is not a move of the model.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from everstep.complete_buckets import CompleteBuckets
from everstep.membership import Membership
from everstep.shares import Pass
from everstep_contract import wire
from everstep_contract.units import Mesh

Numbers = tuple[float, ...]
MICRO_BATCHES = 4


class Group:
    """The process group of an epoch, identified by the epoch's number."""

    abandoned, rank, world = False, 0, 0

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.complete_buckets = 0

    def all_reduce(self, tensor: Any) -> Any:
        raise AssertionError("the model has collectives of its own")

    def wait(self, works: Any) -> bool:
        raise AssertionError("the model has collectives of its own")

    def cut(self) -> None:
        """Does nothing: in the model a collective of a cut group may succeed or fail."""

    def wait_cut(self) -> None:
        pass

    def drop(self) -> None:
        """Does nothing: the model has no resources."""


GROUPS = [Group(epoch) for epoch in range(8)]


class Kept(NamedTuple):
    """The fields of `Membership`, named without the underscore. A group is given by its epoch (0:
    none), a pass by its micro-batch, and a filler by the bitwise complement of its micro-batch (-1:
    a filler for micro-batch 0).
    """

    epoch: int
    rank: int
    world: int
    group: int
    newest: int
    applied: int = 0
    ended: tuple[tuple[int, int], ...] = ()
    reductions: int = 0
    vector: Numbers | None = None
    begun: tuple[int, ...] | None = None
    micro_batches: int = 0
    more: tuple[int, ...] = ()
    assigned: tuple[int, ...] | None = None
    rescue: Numbers | None = None
    held: bool = False
    apart: str = ""
    lost_unit: str = ""
    shard: int = 1
    tensor: int = 1
    buckets: int = 0
    """The field of `CompleteBuckets`."""
    launched: int = 0
    """The group in which the sums were launched last."""
    of_group: int = 0
    """`complete_buckets` of `group`, and of `launched`."""
    of_launched: int = 0


class Done(NamedTuple):
    kept: Kept
    result: Any
    sent: tuple[Any, ...]


def first(rank: int, world: int) -> Kept:
    return Kept(epoch=1, rank=rank, world=world, group=1, newest=1)


class LateRescue(Membership):
    """A variant: a vector that is handed to a rank counts although the rank is held and has
    reported that it does not have it.
    """

    def take_rescue(self) -> Any:
        vector, self._rescue = self._rescue, None
        if vector is not None:
            self._end_reduction(vector)
        return vector


class LateReduction(Membership):
    """A variant: a reduction counts although the standing was reported without it."""

    def complete(self, group: Any, vector: Any) -> bool:
        if group is not self._group:
            return False
        self._end_reduction(vector)
        return True


class EarlyMark(Membership):
    """A variant: a rank that is held names the epoch of a step at once."""

    def mark_applied(self, step: int) -> int:
        self._applied = step
        return next((epoch for last, epoch in self._ended if step <= last), self.epoch)


class Overcounted(CompleteBuckets):
    """A variant: buckets still count as complete when their buffers are filled for the next group."""

    def launch(self, group: Any) -> None:
        buckets = self.buckets
        super().launch(group)
        self.buckets = max(self.buckets, buckets)


class NeverOver(CompleteBuckets):
    """A variant: the buckets of a reduction count for the next one, too."""

    def end(self, group: Any) -> None:
        pass


def count_with(kind: type[CompleteBuckets]) -> type[Membership]:
    class Counting(Membership):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            self._complete = kind()

    return Counting


@lru_cache(maxsize=1 << 18)
def act(kind: type[Membership], kept: Kept, name: str, *args: Any) -> Done:
    """Call a method. Returns the state that it leaves, its result, and what it sends. An argument
    may be a vector, or a group, which is given by its epoch.
    """
    sent: list[Any] = []
    membership = _restore(kind, kept, sent.append)
    if name == "regroup":
        membership.regroup(args[0])  # type: ignore[func-returns-value]
        result = None
    elif name == "complete":
        result = membership.complete(GROUPS[args[0]], np.array(args[1], np.float64))
    elif name == "count_complete":
        result = membership.count_complete(GROUPS[args[0]], args[1])  # type: ignore[func-returns-value]
    elif name == "fail":
        result = membership.fail(GROUPS[args[0]])  # type: ignore[func-returns-value]
    else:
        result = getattr(membership, name)(*args)
    return Done(_capture(membership), _freeze(result), tuple(sent))


def _restore(kind: type[Membership], kept: Kept, send: Callable[[Any], None]) -> Membership:
    start = wire.Start(
        epoch=kept.epoch, rank=kept.rank, world=kept.world, local_rank=0, local_world=1, node_rank=0,
        job="", run="", applied=kept.applied, manifest=None, places=None, staging="",
        mesh=Mesh(shard=kept.shard, tensor=kept.tensor),
    )  # fmt: skip
    made = kind(
        start, GROUPS[kept.newest], send=send, form=lambda frame, endpoint: GROUPS[frame.epoch]
    )
    made._group = GROUPS[kept.group] if kept.group else None
    GROUPS[kept.launched].complete_buckets = kept.of_launched
    GROUPS[kept.group].complete_buckets = kept.of_group
    made._complete.buckets = kept.buckets
    made._complete._group = GROUPS[kept.launched] if kept.launched else None
    made._ended, made._reductions = list(kept.ended), kept.reductions
    made._vector = None if kept.vector is None else np.array(kept.vector, np.float64)
    made._begun = None if kept.begun is None else list(map(_pass, kept.begun))
    made._micro_batches, made._more = kept.micro_batches, list(map(_pass, kept.more))
    made._assigned = None if kept.assigned is None else list(map(_pass, kept.assigned))
    made._rescue = None if kept.rescue is None else np.array(kept.rescue, np.float64)
    made._held, made._apart, made._lost_unit = kept.held, kept.apart, kept.lost_unit
    made._form_group = lambda frame, endpoint: None  # type: ignore[method-assign]
    return made


def _capture(made: Membership) -> Kept:
    return Kept(
        made.epoch, made.rank, made.world, _epoch(made._group), _epoch(made._newest), made._applied,
        tuple(made._ended), made._reductions, _freeze(made._vector), _freeze(made._begun),
        made._micro_batches, _freeze(made._more), _freeze(made._assigned), _freeze(made._rescue),
        made._held, made._apart, made._lost_unit, made.mesh.shard, made.mesh.tensor,
        made._complete.buckets, _epoch(made._complete._group),
        _complete(made._group), _complete(made._complete._group),
    )  # fmt: skip


def _complete(group: Any) -> int:
    return group.complete_buckets if group is not None else 0


def _epoch(group: Any) -> int:
    return group.epoch if group is not None else 0


def _freeze(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return tuple(value.tolist())
    if isinstance(value, list):
        return tuple(_number(one) if isinstance(one, Pass) else one for one in value)
    return value


def _pass(number: int) -> Pass:
    return Pass(number) if number >= 0 else Pass(~number, filler=True)


def _number(one: Pass) -> int:
    return ~one.index if one.filler else one.index

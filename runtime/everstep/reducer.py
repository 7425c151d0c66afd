"""Gradients: hooks move them out of `.grad`, the group sums them bucket by bucket in flat buffers,
and `.grad` becomes a view of these when all sums are complete. A rank that is alone needs no
buffers: it gets its own gradients back.

A rank's own gradients stay as they are until the reduced copy is complete. Every rank launches the
buckets in the same order, and the vector after them. A launch that fails does not raise in the
script; `end` reports it. If the sums are launched again in another group, buckets that are complete
on all its ranks stay as they are.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from everstep import fixed_point, spread
from everstep.buckets import BUCKET_BYTES, Bucket, Plan, as_real, sum_dtype
from everstep.device import read_numbers
from everstep.errors import Misuse
from everstep.group import Group, LocalGroup, TellMoved, tell_nobody
from everstep.sharded import local_of, with_local
from everstep.sum_marks import SumMarks
from everstep.unit import Squares

BLOCK, SAMPLED = 2**12, 32
"""An estimate of the norm uses the first of each 32 blocks. A block has 2**12 elements: smaller ones are read from
memory at half the speed.
"""
PLAN_STEPS = 4
"""The buffers of a list of parameters are kept for so many steps in which no loop uses them."""
LEAST_SAMPLED = 8 * BLOCK * SAMPLED
"""Of fewer elements, an estimate uses all."""


def _whole(flat: torch.Tensor) -> torch.Tensor:
    return torch.dot(flat, flat)


def _sample(flat: torch.Tensor) -> torch.Tensor:
    """Estimate the sum of the squares."""
    if flat.numel() < LEAST_SAMPLED:
        return _whole(flat)
    rows = flat.numel() // (BLOCK * SAMPLED)
    blocks = flat[: rows * BLOCK * SAMPLED].view(rows, SAMPLED * BLOCK)[:, :BLOCK]
    found = blocks.reshape(-1).to(sum_dtype(flat.dtype))
    return _whole(found) * (flat.numel() / found.numel())


Tell = Callable[[Group, int], None]
"""Called with a group and how many of the buckets that were launched in it are complete, from any thread."""


class _Round:
    """One launch of the sums in a group; those of the first buckets may be complete already."""

    def __init__(self, group: Group, marks: SumMarks, tell: Tell) -> None:
        self.group, self._first = group, group.complete_buckets
        self.complete = self._first
        """How many buckets are complete, from the first on."""
        self._marks, self._number, self._tell = marks, marks.round, tell
        if self.complete:
            marks.complete(self._number, self.complete)

    def note(self, launched: int) -> None:
        """So many of the buckets that were launched here are complete."""
        self.complete = self._first + launched
        self._marks.complete(self._number, self.complete)
        self._tell(self.group, launched)


class Reducer:
    """Sums the gradients. `exact`: as fixed-point integers (`fixed_point.py`);
    `marks`: shows how far the sums are; `tell`: hears it, too.
    """

    def __init__(
        self,
        bucket_bytes: int = BUCKET_BYTES,
        *,
        exact: bool = False,
        marks: SumMarks | None = None,
        tell: Tell = lambda group, complete: None,
    ) -> None:
        self._exact = exact
        self._marks, self._tell = marks or SumMarks(), tell
        self._micro_batches = 1
        self._scale = 1.0
        self._group: Group | None = None
        """The group in which the current sums are launched."""
        self._kept = False
        """The newest gradients that were delivered are this rank's own."""
        self._bucket_bytes = bucket_bytes
        self._hooked: dict[int, Any] = {}
        """Id of a parameter → the handle of its hook; None: it can never require a gradient."""
        self._watched: dict[int, torch.nn.Parameter] = {}
        """Id → parameter, of those that may have a gradient."""
        self._aside: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        """Gradients that a former loop of the step delivered for other parameters, until this loop is over."""
        self.dropped: set[int] = set()
        """Ids of parameters whose gradients this loop has dropped, because it does not sum them."""
        self._plans: dict[tuple[int, ...], Plan] = {}
        self._used_in: dict[tuple[int, ...], int] = {}
        """The same keys → the last step that used the plan, in the count of this process."""
        self._steps = 0
        self._plan = Plan({}, bucket_bytes)
        self._own: list[torch.Tensor | None] = []
        self._largest: dict[str, torch.Tensor] = {}
        """Parameter name → the largest magnitude in its gradient of the newest backward pass; only with `exact`."""
        self._works: list[Any] = []
        self._last: Any = None
        self._round: _Round | None = None
        self._next = 0
        """The bucket that is launched next."""
        self._open = self._inside = self._counting = False

    def watch(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Hook these parameters, frozen ones too: the script may unfreeze them within a loop. A gradient
        that the loop did not ask for is dropped.
        """
        for parameter in parameters:
            key = id(parameter)
            if key in self._watched:
                continue
            if key not in self._hooked:
                self._hooked[key] = self._hook(parameter)
                if parameter.grad is not None:
                    self._watched[key] = parameter
            if parameter.requires_grad:
                self._watched[key] = parameter

    def _hook(self, parameter: torch.nn.Parameter) -> Any:
        register: Any = parameter.register_post_accumulate_grad_hook
        if parameter.requires_grad:
            return register(self._on_grad)
        try:
            parameter.requires_grad_(True)  # else torch takes no hook
        except RuntimeError:  # whole numbers, for example
            return None
        try:
            return register(self._on_grad)
        finally:
            parameter.requires_grad_(False)

    def begin_step(self) -> None:
        """End the gradients of the step before, of all parameters: a rank that joins has none."""
        if self._steps:  # else they are not of a step, and the first loop refuses them
            for parameter in self._watched.values():
                parameter.grad = None
        self._steps += 1
        for key in [k for k, step in self._used_in.items() if self._steps - step > PLAN_STEPS]:
            del self._plans[key], self._used_in[key]

    def list_held(self) -> list[torch.nn.Parameter]:
        """The parameters that have a gradient now."""
        return [p for p in self._watched.values() if p.grad is not None]

    def begin(
        self, named: dict[str, torch.nn.Parameter], micro_batches: int, *, first: bool = True
    ) -> None:
        """Begin a loop over `micro_batches` of all ranks: there is no gradient yet, and `.grad` is None.

        Args:
            first: this is the first loop of its step, and no parameter has a gradient.
        """
        self._micro_batches = micro_batches
        self._plan = self._find_plan(named)
        self.watch(self._plan.parameters)
        self._own = [None] * len(named)
        self._reset()
        self._aside, self.dropped = [], set()
        if not first:
            self._set_aside()
        self._plan.leave_shared()
        self._open, self._counting = True, False

    def _set_aside(self) -> None:
        """Keep what former loops of the step have delivered for parameters that this one does not sum."""
        held = self.list_held()
        others = [p for p in held if id(p) not in self._plan.index]
        self._aside = [(p, p.grad) for p in others if p.grad is not None]
        for parameter in held:
            parameter.grad = None

    def _find_plan(self, named: dict[str, torch.nn.Parameter]) -> Plan:
        key = tuple(id(p) for p in named.values())
        self._used_in[key] = self._steps
        if key not in self._plans:
            self._plans[key] = Plan(named, self._bucket_bytes, exact=self._exact)
        return self._plans[key]

    def repeat(self) -> None:
        """Prepare to sum again after the sums failed. This rank's gradients stay, and more may be
        added before the next launch.
        """
        if self._round is not None and self._round.group.abandoned:
            self._plan.replace_buffers(self._round.complete)
        self._reset()
        self._open = True

    def _reset(self) -> None:
        self._group, self._works, self._last = None, [], None
        self._round, self._next = None, 0
        for bucket in self._plan.buckets:
            bucket.reset()
        self._marks.begin(len(self._plan.buckets))

    def backward(self, loss: torch.Tensor, *, overlap: Group | None, scale: float = 1.0) -> None:
        """Run one backward. In this rank's last one, `overlap` is the group in which each bucket is
        launched once it is full. `scale`: the loss scale of a GradScaler, which `loss` contains.
        """
        self._scale, self._largest = scale, {}
        self._inside, self._counting = True, overlap is not None
        if overlap is not None:
            self._launch_in(overlap)
        try:
            loss.backward()  # type: ignore[no-untyped-call]
        finally:
            self._inside = self._counting = False
        if self._largest:
            fixed_point.require_fit(self._largest, self._micro_batches)

    def flush(self, group: Group) -> None:
        """Launch the remaining buckets; parameters without a gradient add zeros."""
        self._launch_in(group)
        for bucket in self._plan.buckets:
            bucket.missing.clear()
        self._launch_full()

    def _launch_in(self, group: Group) -> None:
        if group is not self._group:
            self._group, self._next = group, group.complete_buckets
            self._round = _Round(group, self._marks, self._tell)
            group.begin_sums(self._round.note)

    def used(self) -> list[float]:
        return [0.0 if own is None else 1.0 for own in self._own]

    def start_last(self, vector: torch.Tensor) -> None:
        """Launch the vector's sum after the buckets."""
        assert self._group is not None
        works, self._works = self._works, []
        self._marks.join(self._next + 1)
        self._last = self._group.start_last(works, vector)

    def end(self, look: TellMoved = tell_nobody) -> torch.Tensor | None:
        """Wait for the vector's sum, which is returned if every sum is complete on every rank. From
        now on the hooks do nothing.
        """
        assert self._group is not None
        self._open = False
        return self._group.end_last(self._last, look)

    @property
    def summed(self) -> bool:
        """Whether every bucket's sum is complete, with or without the vector."""
        return self._last is not None and bool(self._last.own)

    def deliver(self, used: Sequence[float], factor: float, *, scale: float = 1.0) -> None:
        """Set `.grad` to the reduced gradient × `factor`, or to None if no rank had a gradient.
        `scale`: as in `backward`, the mean over the micro-batches.
        """
        plan, own, self._kept = self._plan, self._own, self._alone
        self._own = [None] * len(plan.parameters)
        self._marks.end()
        sums: Sequence[torch.Tensor | None] = own if self._kept else plan.views
        if not self._exact and factor != 1.0:
            flats = [plan.buffer(bucket) for bucket in plan.buckets] if not self._kept else own
            if scaled := [flat for flat in flats if flat is not None]:
                torch._foreach_mul_(scaled, factor)
        copied: dict[int, torch.Tensor] = {}
        for index, parameter in enumerate(plan.parameters):
            total = sums[index]
            if not used[index] or total is None:
                parameter.grad = None
                continue
            if plan.fits(index, total) if self._kept else plan.shown[index]:
                part = plan.shape(index, total.detach())
            else:
                part = plan.new_gradient(index)
                copied[index] = total
            parameter.grad = with_local(parameter, part)
        self._copy(copied, factor, scale)
        for other, grad in self._aside:
            other.grad = grad
        self._aside = []

    @property
    def _alone(self) -> bool:
        """Whether the sums are this rank's own gradients."""
        return self._group is not None and self._group.world == 1 and not self._exact

    def measure(self, *, sampled: bool) -> float | None:
        """Measure the global 2-norm of the delivered gradients; it is the same on all ranks.
        None: a rank of the unit is lost.

        Args:
            sampled: estimate it from a 32nd of each large bucket.
        """
        squares = dict.fromkeys(("whole", "shard", "tensor", "both"), 0.0)
        found = list(self._square(sampled=sampled))
        for (place, _), value in zip(found, read_numbers([s for _, s in found]), strict=True):
            squares[place] += value
        total = (self._group or LocalGroup()).add_squares(Squares(**squares))
        return None if total is None else math.sqrt(total)

    def _square(self, *, sampled: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """Sums of squares, and where each is to be added up. Small gradients in tensors of their own
        are taken together.
        """
        if not (self._exact or self._kept):
            square = _sample if sampled else _whole
            yield from ((b.spread.place, square(self._plan.buffer(b))) for b in self._plan.buckets)
            return
        together: dict[tuple[str, torch.dtype], list[torch.Tensor]] = {}
        for index, parameter in enumerate(self._plan.parameters):
            if parameter.grad is None:
                continue
            place, part = self._plan.place(index), as_real(local_of(parameter.grad))
            if sampled and part.numel() >= LEAST_SAMPLED:
                yield place, _sample(part.reshape(-1))
            else:
                together.setdefault((place, part.dtype), []).append(part)
        for (place, dtype), parts in together.items():
            norms = torch._foreach_norm(parts, 2, sum_dtype(dtype))
            yield place, torch.stack(norms).square().sum()

    def _copy(self, sums: dict[int, torch.Tensor], factor: float, scale: float) -> None:
        if not sums:
            return
        grads = [self._plan.parameters[i].grad for i in sums]
        parts = [as_real(local_of(grad)) for grad in grads if grad is not None]
        if not self._exact:
            torch._foreach_copy_(parts, list(sums.values()))
            return
        for part, total in zip(parts, sums.values(), strict=True):
            part.copy_(fixed_point.from_fixed(total, self._micro_batches, scale * factor))

    def abandon(self) -> None:
        """Give up a loop that will not end: the hooks do nothing, gradients are dropped."""
        self._open = False
        self._marks.end()
        self._works, self._own = [], [None] * len(self._plan.parameters)
        self._aside = []

    def _on_grad(self, parameter: torch.nn.Parameter) -> None:
        if not self._open:
            self._watched[id(parameter)] = parameter
            return
        grad, parameter.grad = parameter.grad, None
        if not self._inside:
            raise Misuse(
                "backward() inside the loop: call step.backward(loss), not loss.backward(). For the gradient of the "
                "inputs alone, call torch.autograd.grad(loss, inputs)"
            )
        index = self._plan.index.get(id(parameter))
        if index is None:
            self.dropped.add(id(parameter))
        if index is None or grad is None:
            return
        bucket = self._plan.bucket_of[index]
        if bucket.launched:
            raise Misuse(
                f"the gradient of {self._plan.names[index]} came again after its bucket was sent: "
                "with activation checkpointing use use_reentrant=False, or "
                "step.batches(…, overlap=False)"
            )
        self._add(index, grad)
        if self._counting:
            self._copy_early(bucket, index)
            bucket.missing.discard(index)
            if not bucket.missing:
                self._launch_full()

    def _add(self, index: int, grad: torch.Tensor) -> None:
        if grad.layout != torch.strided:
            raise Misuse(f"the gradient of {self._plan.names[index]} is sparse; use sparse=False")
        grad = as_real(spread.take_local(grad, self._plan.parameters[index]))
        own = self._own[index]
        if self._exact:
            grad = grad / self._scale if self._scale != 1.0 else grad
            grad, self._largest[self._plan.names[index]] = fixed_point.to_fixed(
                grad, self._micro_batches
            )
        if own is None:
            self._own[index] = grad
        elif own.dtype == sum_dtype(own.dtype):
            own.add_(grad)
        else:
            self._own[index] = own.to(torch.float32).add_(grad)

    def _copy_early(self, bucket: Bucket, index: int) -> None:
        """Copy a gradient into its bucket's buffer while the processor's cache holds it."""
        own = self._own[index]
        if own is None or not self._plan.on_cpu or self._alone or bucket.number < self._next:
            return
        self._plan.buffer(bucket)
        self._plan.views[index].copy_(own)
        bucket.copied.add(index)

    def _launch_full(self) -> None:
        while self._next < len(self._plan.buckets) and not self._plan.buckets[self._next].missing:
            bucket = self._plan.buckets[self._next]
            self._next += 1
            self._launch(bucket)

    def _launch(self, bucket: Bucket) -> None:
        bucket.launched = True
        assert self._group is not None
        gathered = torch.empty(0) if self._alone else self._gather(bucket)
        self._works.append(self._group.all_reduce(gathered, bucket.spread.over))
        self._marks.join(self._next)

    def _gather(self, bucket: Bucket) -> torch.Tensor:
        """Copy this rank's gradients into the bucket's buffer."""
        flat, views = self._plan.buffer(bucket), self._plan.views
        have = [i for i in bucket.indices if self._own[i] is not None and i not in bucket.copied]
        for index in bucket.indices:
            if self._own[index] is None:
                views[index].zero_()
        if have:
            torch._foreach_copy_([views[i] for i in have], [self._own[i] for i in have])  # type: ignore[misc]
        return flat

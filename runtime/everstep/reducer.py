"""Gradients: hooks move them out of `.grad`, the group sums them bucket by bucket, and they are put
back when all sums are complete.

A rank's own gradients stay as they are until the reduced copy is complete. Every rank launches the
buckets in the same order, the vector last. Two flat buffers alternate, so that one reduction is
intact while the next is computed. A launch that fails does not raise in the script: `wait` tells.
"""

from collections.abc import Sequence
from typing import Any

import torch

from everstep import fixed_point, shares
from everstep.errors import Misuse
from everstep.group import Group

BUCKET_BYTES = 25 * 2**20
"""Measured beside DDP on gloo: buckets of 1 MB cost 40 % of a step, and one bucket for all is worse
than several.
"""
_NARROW = (torch.float16, torch.bfloat16)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a gradient's sum: half precision is accumulated and reduced in float32."""
    return torch.float32 if dtype in _NARROW else dtype


class _Bucket:
    def __init__(self, indices: list[int], flats: list[torch.Tensor]) -> None:
        self.indices = indices
        self.flats = flats
        """The slice of this bucket in each of the two buffers."""
        self.missing: set[int] = set()
        self.launched = False

    def reset(self) -> None:
        self.missing, self.launched = set(self.indices), False


class _Plan:
    """Buckets and buffers for one list of parameters; the same on every rank."""

    def __init__(
        self, named: dict[str, torch.nn.Parameter], bucket_bytes: int, *, exact: bool = False
    ) -> None:
        self._exact = exact
        self.names, self.parameters = list(named), list(named.values())
        self.index = {id(p): i for i, p in enumerate(self.parameters)}
        devices = {p.device.type for p in self.parameters}
        if len(devices) > 1:
            raise Misuse(
                f"parameters on {' and '.join(sorted(devices))}: train on one kind of device"
            )
        described = [self._describe(p) for p in self.parameters]
        self.views = [[torch.empty(0)] * len(self.parameters) for _ in range(2)]
        self.buckets = [self._allocate(i) for i in shares.plan_buckets(described, bucket_bytes)]
        self.bucket_of = {i: bucket for bucket in self.buckets for i in bucket.indices}

    def _allocate(self, indices: list[int]) -> _Bucket:
        first = self.parameters[indices[0]]
        sizes = [self.parameters[i].numel() for i in indices]
        flats = [
            torch.zeros(sum(sizes), dtype=self._dtype(first), device=first.device) for _ in range(2)
        ]
        for turn, flat in enumerate(flats):
            self._set_views(turn, indices, flat)
        return _Bucket(indices, flats)

    def _set_views(self, turn: int, indices: list[int], flat: torch.Tensor) -> None:
        sizes = [self.parameters[i].numel() for i in indices]
        for index, view in zip(indices, torch.split(flat, sizes), strict=True):
            self.views[turn][index] = view.view(self.parameters[index].shape)

    def replace_buffers(self, turn: int) -> None:
        """For operations that were abandoned: they may still write into the old ones."""
        for bucket in self.buckets:
            bucket.flats[turn] = torch.zeros_like(bucket.flats[turn])
            self._set_views(turn, bucket.indices, bucket.flats[turn])

    def _dtype(self, parameter: torch.nn.Parameter) -> torch.dtype:
        return torch.int64 if self._exact else sum_dtype(parameter.dtype)

    def _describe(self, parameter: torch.nn.Parameter) -> shares.Parameter:
        dtype = self._dtype(parameter)
        kind = f"{parameter.device}/{dtype}"
        return shares.Parameter(elements=parameter.numel(), item_bytes=dtype.itemsize, kind=kind)


class Reducer:
    """`exact`: gradients are added as fixed-point integers (`fixed_point.py`)."""

    def __init__(self, bucket_bytes: int = BUCKET_BYTES, *, exact: bool = False) -> None:
        self._exact = exact
        self._micro_batches = 1
        self._scale = 1.0
        self._group: Group | None = None
        """In which the present sums are launched."""
        self._bucket_bytes = bucket_bytes
        self._hooked: dict[int, Any] = {}
        self._plans: dict[tuple[int, ...], _Plan] = {}
        self._plan = _Plan({}, bucket_bytes)
        self._own: list[torch.Tensor | None] = []
        self._works: list[Any] = []
        self._vector_work: Any = None
        self.summed = False
        """Every bucket's sum is complete, with or without the vector."""
        self._turn = 0
        self._next = 0
        self._open = self._inside = self._counting = False

    def watch(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Hook these parameters. A gradient that the loop did not ask for is dropped."""
        for parameter in parameters:
            if id(parameter) not in self._hooked and parameter.requires_grad:
                hook: Any = parameter.register_post_accumulate_grad_hook
                self._hooked[id(parameter)] = hook(self._on_grad)

    def begin(self, named: dict[str, torch.nn.Parameter], micro_batches: int) -> None:
        """A loop over so many micro-batches of all ranks begins: no gradient yet, and `.grad` is
        None.
        """
        self._micro_batches = micro_batches
        key = tuple(id(p) for p in named.values())
        if key not in self._plans:
            self._plans[key] = _Plan(named, self._bucket_bytes, exact=self._exact)
        self._plan = self._plans[key]
        self.watch(self._plan.parameters)
        self._own = [None] * len(key)
        self._turn = 1 - self._turn
        self._reset()
        for parameter in self._plan.parameters:
            parameter.grad = None
        self._open, self._counting = True, False

    def repeat(self) -> None:
        """The sums failed: this rank's gradients stay, and more may be added before the next
        launch.
        """
        if self._group is not None and self._group.abandoned:
            self._plan.replace_buffers(self._turn)
        self._reset()
        self._open = True

    def _reset(self) -> None:
        self._group, self._works, self._vector_work = None, [], None
        self._next, self.summed = 0, False
        for bucket in self._plan.buckets:
            bucket.reset()

    def backward(self, loss: torch.Tensor, *, overlap: Group | None, scale: float = 1.0) -> None:
        """One backward. In this rank's last one, `overlap` is the group in which each bucket is
        launched once it is full. `scale`: the loss scale of a GradScaler, which `loss` contains.
        """
        self._scale = scale
        self._inside, self._counting = True, overlap is not None
        self._group = overlap
        try:
            loss.backward()  # type: ignore[no-untyped-call]
        finally:
            self._inside = self._counting = False

    def flush(self, group: Group) -> None:
        """Launch the buckets that are left; parameters without a gradient add zeros."""
        self._group = group
        for bucket in self._plan.buckets:
            bucket.missing.clear()
        self._launch_full()

    def used(self) -> list[float]:
        return [0.0 if own is None else 1.0 for own in self._own]

    def launch_last(self, vector: torch.Tensor) -> None:
        """Launch the vector after every bucket."""
        assert self._group is not None
        self._vector_work = self._group.all_reduce(vector)

    def wait(self) -> bool:
        """Whether every sum is complete, the vector's too; from here on the hooks do nothing."""
        assert self._group is not None
        self._open = False
        works, self._works = self._works, []
        last, self._vector_work = self._vector_work, None
        self.summed = self._group.wait(works)
        return self.summed and self._group.wait([last])

    def deliver(
        self, used: Sequence[float], factor: float, *, scale: float = 1.0
    ) -> list[torch.Tensor]:
        """Set `.grad` to the reduced gradient × `factor`, or None where no rank had one. `scale`: as
        in `backward`, the mean over the micro-batches.

        Returns:
            The gradients that were set.
        """
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        grads: list[torch.Tensor] = []
        for index, parameter in enumerate(self._plan.parameters):
            if not used[index]:
                parameter.grad = None
                continue
            view, own = self._plan.views[self._turn][index], self._own[index]
            if own is None or own.dtype != parameter.dtype:
                own = torch.empty_like(parameter, memory_format=torch.preserve_format)
            copies.append((own, view))
            parameter.grad = own
            grads.append(own)
        if grads:
            sums = [view for _, view in copies]
            if self._exact:
                sums = [fixed_point.from_fixed(s, self._micro_batches).mul_(scale) for s in sums]
            torch._foreach_copy_([own for own, _ in copies], sums)
            if factor != 1.0:
                torch._foreach_mul_(grads, factor)
        self._own = [None] * len(self._plan.parameters)
        return grads

    def abandon(self) -> None:
        """The loop will not end: the hooks do nothing, gradients are dropped."""
        self._open = False
        self._works, self._vector_work, self._own = [], None, [None] * len(self._plan.parameters)

    def _on_grad(self, parameter: torch.Tensor) -> None:
        if not self._open:
            return
        grad, parameter.grad = parameter.grad, None
        if not self._inside:
            raise Misuse(
                "backward() inside the loop: call step.backward(loss), not loss.backward()"
            )
        index = self._plan.index.get(id(parameter))
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
            bucket.missing.discard(index)
            self._launch_full()

    def _add(self, index: int, grad: torch.Tensor) -> None:
        if grad.layout != torch.strided:
            raise Misuse(f"the gradient of {self._plan.names[index]} is sparse; use sparse=False")
        own = self._own[index]
        if self._exact:
            grad = grad / self._scale if self._scale != 1.0 else grad
            grad = fixed_point.to_fixed(grad, self._micro_batches, self._plan.names[index])
        if own is None:
            self._own[index] = grad
        elif own.dtype == sum_dtype(own.dtype):
            own.add_(grad)
        else:
            self._own[index] = own.to(torch.float32).add_(grad)

    def _launch_full(self) -> None:
        while self._next < len(self._plan.buckets) and not self._plan.buckets[self._next].missing:
            self._launch(self._plan.buckets[self._next])
            self._next += 1

    def _launch(self, bucket: _Bucket) -> None:
        bucket.launched = True
        views = self._plan.views[self._turn]
        have = [i for i in bucket.indices if self._own[i] is not None]
        for index in bucket.indices:
            if self._own[index] is None:
                views[index].zero_()
        if have:
            torch._foreach_copy_([views[i] for i in have], [self._own[i] for i in have])  # type: ignore[misc]
        assert self._group is not None
        self._works.append(self._group.all_reduce(bucket.flats[self._turn]))

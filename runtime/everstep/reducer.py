"""Gradients: moved out of `.grad` by hooks, summed over the group bucket by bucket, put back when
all are complete.

Out of place: a rank's own accumulators stay as they are until the reduced copy is complete. Buckets
are launched in one strict order on every rank, the vector last. Two flat buffers alternate, so that
the reduced gradient of one reduction is intact while the next is computed. Nothing here issues a
collective except a launch, and a failed launch never raises in user code: only `wait` tells.
"""

from collections.abc import Sequence
from typing import Any

import torch

from everstep import shares
from everstep.errors import Misuse
from everstep.group import Group

BUCKET_BYTES = 25 * 2**20
"""Measured beside DDP: 1 MB costs 40 % of a step on gloo, one bucket for all is worse than several.
"""
_NARROW = (torch.float16, torch.bfloat16)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Half precision is accumulated and reduced in float32."""
    return torch.float32 if dtype in _NARROW else dtype


class _Bucket:
    def __init__(self, indices: list[int], flats: Sequence[torch.Tensor]) -> None:
        self.indices = indices
        self.flats = flats
        """The slice of this bucket in each of the two buffers."""
        self.missing: set[int] = set()
        self.launched = False


class _Plan:
    """Buckets and buffers for one list of parameters: a pure function of that list."""

    def __init__(self, named: dict[str, torch.nn.Parameter], bucket_bytes: int) -> None:
        self.names, self.parameters = list(named), list(named.values())
        self.index = {id(p): i for i, p in enumerate(self.parameters)}
        devices = {p.device.type for p in self.parameters}
        if len(devices) > 1:
            raise Misuse(
                f"parameters on {' and '.join(sorted(devices))}: train on one kind of device"
            )
        described = [_describe(p) for p in self.parameters]
        self.views = [[torch.empty(0)] * len(self.parameters) for _ in range(2)]
        self.buckets = [self._allocate(i) for i in shares.plan_buckets(described, bucket_bytes)]
        self.bucket_of = {i: bucket for bucket in self.buckets for i in bucket.indices}

    def _allocate(self, indices: list[int]) -> _Bucket:
        first = self.parameters[indices[0]]
        sizes = [self.parameters[i].numel() for i in indices]
        flats = [
            torch.zeros(sum(sizes), dtype=sum_dtype(first.dtype), device=first.device)
            for _ in range(2)
        ]
        for turn, flat in enumerate(flats):
            for index, view in zip(indices, torch.split(flat, sizes), strict=True):
                self.views[turn][index] = view.view(self.parameters[index].shape)
        return _Bucket(indices, flats)


def _describe(parameter: torch.nn.Parameter) -> shares.Parameter:
    dtype = sum_dtype(parameter.dtype)
    return shares.Parameter(
        elements=parameter.numel(), item_bytes=dtype.itemsize, kind=f"{parameter.device}/{dtype}"
    )


class Reducer:
    def __init__(self, group: Group, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._group = group
        self._bucket_bytes = bucket_bytes
        self._hooked: dict[int, Any] = {}
        self._plans: dict[tuple[int, ...], _Plan] = {}
        self._plan = _Plan({}, bucket_bytes)
        self._own: list[torch.Tensor | None] = []
        self._works: list[Any] = []
        self._turn = 0
        self._next = 0
        self._open = self._inside = self._counting = False

    def watch(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Hook parameters; inside a loop the gradients of those that it does not ask for go."""
        for parameter in parameters:
            if id(parameter) not in self._hooked and parameter.requires_grad:
                hook: Any = parameter.register_post_accumulate_grad_hook
                self._hooked[id(parameter)] = hook(self._on_grad)

    def begin(self, named: dict[str, torch.nn.Parameter]) -> None:
        """A loop begins: empty accumulators, `.grad` None."""
        key = tuple(id(p) for p in named.values())
        if key not in self._plans:
            self._plans[key] = _Plan(named, self._bucket_bytes)
        self._plan = self._plans[key]
        self.watch(self._plan.parameters)
        self._own = [None] * len(key)
        self._works = []
        self._turn, self._next = 1 - self._turn, 0
        for bucket in self._plan.buckets:
            bucket.missing, bucket.launched = set(bucket.indices), False
        for parameter in self._plan.parameters:
            parameter.grad = None
        self._open, self._counting = True, False

    def backward(self, loss: torch.Tensor, *, last: bool, overlap: bool) -> None:
        """One backward; in the last of this rank a bucket is launched as soon as it is full."""
        self._inside, self._counting = True, last and overlap
        try:
            loss.backward()  # type: ignore[no-untyped-call]
        finally:
            self._inside = self._counting = False

    def flush(self) -> None:
        """Launch what is not under way yet: parameters without a gradient add zeros."""
        for bucket in self._plan.buckets:
            bucket.missing.clear()
        self._launch_full()

    def used(self) -> list[float]:
        return [0.0 if own is None else 1.0 for own in self._own]

    def launch_last(self, vector: torch.Tensor) -> None:
        """The vector, behind every bucket."""
        self._works.append(self._group.all_reduce(vector))

    def wait(self) -> bool:
        """Whether every sum is complete; afterwards the loop is over for the hooks."""
        self._open = False
        works, self._works = self._works, []
        return self._group.wait(works)

    def deliver(self, used: Sequence[float], factor: float) -> list[torch.Tensor]:
        """Set `.grad` to the reduced gradient × `factor`, None where no rank had one; returns the
        gradients.
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
            torch._foreach_copy_([own for own, _ in copies], [view for _, view in copies])
            if factor != 1.0:
                torch._foreach_mul_(grads, factor)
        self._own = [None] * len(self._plan.parameters)
        return grads

    def abandon(self) -> None:
        """The loop will not end: hooks stand down, accumulators go."""
        self._open = False
        self._works, self._own = [], [None] * len(self._plan.parameters)

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
                "with activation "
                "checkpointing use use_reentrant=False, or step.batches(…, overlap=False)"
            )
        self._add(index, grad)
        if self._counting:
            bucket.missing.discard(index)
            self._launch_full()

    def _add(self, index: int, grad: torch.Tensor) -> None:
        if grad.layout != torch.strided:
            raise Misuse(f"the gradient of {self._plan.names[index]} is sparse; use sparse=False")
        own = self._own[index]
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
        self._works.append(self._group.all_reduce(bucket.flats[self._turn]))

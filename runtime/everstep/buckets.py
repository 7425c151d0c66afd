"""The buckets in which gradients are summed, and their flat buffers. `reducer.py` fills and sums them.

The buckets are the same on every rank. A buffer is allocated for the first sum over several ranks.
"""

import torch

from everstep import shares, spread
from everstep.errors import Misuse
from everstep.sharded import local_of

BUCKET_BYTES = 24 * 2**20
"""The limit of a bucket; a model of less than 192 MiB has smaller ones (`shares.count_buckets`). Measured on gloo:
buckets of 1 MB cost 40 % of a step, of 8 MiB about 4 %, of 12 MiB nothing.
"""
_NARROW = (torch.float16, torch.bfloat16)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a gradient's sum: half precision is accumulated and reduced in float32."""
    return torch.float32 if dtype in _NARROW else dtype


def gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    """The dtype of its gradient; if that is complex, of the pairs. A script may set `grad_dtype` (None: any)."""
    chosen: torch.dtype | None = getattr(parameter, "grad_dtype", None)
    return (chosen or parameter.dtype).to_real()


class Bucket:
    def __init__(self, number: int, indices: list[int], spread: spread.Spread) -> None:
        self.number, self.indices, self.spread = number, indices, spread
        self.flat: torch.Tensor | None = None
        """The gradients one after the other, allocated for the first sum over several ranks."""
        self.uses = 0
        """How many tensors share the memory of `flat` while the script holds no gradients."""
        self.missing: set[int] = set()
        self.copied: set[int] = set()
        """Indices of the gradients that are in the buffer before the bucket is launched."""
        self.launched = False

    def reset(self) -> None:
        self.missing, self.copied, self.launched = set(self.indices), set(), False


class Plan:
    """Buckets and buffers for one list of parameters. The buckets are the same on every rank, for
    its own part of each parameter.
    """

    def __init__(
        self, named: dict[str, torch.nn.Parameter], bucket_bytes: int, *, exact: bool = False
    ) -> None:
        self._exact = exact
        self.names, self.parameters = list(named), list(named.values())
        self.index = {id(p): i for i, p in enumerate(self.parameters)}
        self._spreads = [spread.find_spread(p) for p in self.parameters]
        self._held = [as_real(local_of(p).detach()) for p in self.parameters]
        self._dtypes = [gradient_dtype(p) for p in self.parameters]
        self._complex = [p.is_complex() for p in self.parameters]
        devices = {p.device.type for p in self.parameters}
        if len(devices) > 1:
            raise Misuse(
                f"parameters on {' and '.join(sorted(devices))}: train on one kind of device"
            )
        described = [self._describe(i) for i in range(len(self.parameters))]
        self.views = [torch.empty(0)] * len(self.parameters)
        """The part of its bucket's buffer, by parameter."""
        self.shown = [False] * len(self.parameters)
        """Whether `.grad` may be the view itself, by parameter."""
        planned = shares.plan_buckets(described, bucket_bytes)
        self.buckets = [
            Bucket(number, indices, self._spreads[indices[0]])
            for number, indices in enumerate(planned)
        ]
        self.on_cpu = "cpu" in devices
        self.bucket_of = {i: bucket for bucket in self.buckets for i in bucket.indices}

    def buffer(self, bucket: Bucket) -> torch.Tensor:
        """The bucket's buffer, which is allocated if it has none."""
        if bucket.flat is None:
            held = [self._held[i] for i in bucket.indices]
            size, dtype = sum(h.numel() for h in held), self._sum_dtype(bucket.indices[0])
            bucket.flat = torch.zeros(size, dtype=dtype, device=held[0].device)
            self._set_views(bucket, bucket.flat)
            bucket.uses = _count_uses(bucket.flat)
        return bucket.flat

    def _set_views(self, bucket: Bucket, flat: torch.Tensor) -> None:
        sizes = [self._held[i].numel() for i in bucket.indices]
        for index, view in zip(bucket.indices, torch.split(flat, sizes), strict=True):
            self.views[index] = view.view(self._held[index].shape)
            self.shown[index] = _storage_uses is not None and self.fits(index, self.views[index])

    def replace_buffers(self, complete: int) -> None:
        """Use new buffers except for so many first buckets: operations that were abandoned may still
        write into the old ones.
        """
        for bucket in self.buckets[complete:]:
            bucket.flat = None

    def leave_shared(self) -> None:
        """Use new buffers where the script still holds former gradients, so that these stay as they are."""
        for bucket in self.buckets:
            if bucket.flat is not None and _count_uses(bucket.flat) != bucket.uses:
                bucket.flat = None

    def fits(self, index: int, gradient: torch.Tensor) -> bool:
        """Whether it has the dtype of the parameter's gradient, and the memory layout of the parameter."""
        same = gradient.dtype == self._dtypes[index]
        return same and gradient.stride() == self._held[index].stride()

    def place(self, index: int) -> str:
        """As `Spread.place`."""
        return self._spreads[index].place

    def new_gradient(self, index: int) -> torch.Tensor:
        """Allocate memory for this rank's part of a gradient."""
        held, dtype = self._held[index], self._dtypes[index]
        part = torch.empty_like(held, dtype=dtype, memory_format=torch.preserve_format)
        return self.shape(index, part)

    def shape(self, index: int, part: torch.Tensor) -> torch.Tensor:
        """Give this rank's part of a gradient the dtype kind of its parameter: real or complex."""
        return torch.view_as_complex(part) if self._complex[index] else part

    def _sum_dtype(self, index: int) -> torch.dtype:
        return torch.int64 if self._exact else sum_dtype(self._dtypes[index])

    def _describe(self, index: int) -> shares.Parameter:
        held = self._held[index]
        dtype, parameter = self._sum_dtype(index), self.parameters[index]
        numbers = 2 if self._complex[index] else 1
        return shares.Parameter(
            elements=spread.count_planned(parameter) * numbers,
            item_bytes=dtype.itemsize,
            # A complex view must begin at an even place of the buffer.
            kind=f"{held.device}/{dtype}/{self._spreads[index]}/{numbers}",
        )


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Complex numbers as pairs of real ones, without a copy unless they are conjugated lazily."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


_storage_uses = getattr(torch._C, "_storage_Use_Count", None)


def _count_uses(flat: torch.Tensor) -> int:
    """How many tensors share the memory of `flat`."""
    if _storage_uses is None:
        return 0
    found: int = _storage_uses(flat.untyped_storage()._cdata)
    return found

"""Whether a save is free of NaN and infinity: in a parameter or in an optimizer's moment they mean damage.

Other state may hold them on purpose: a mask of -inf in a buffer, a running minimum that begins with
inf. So only parameters and the state of optimizers are checked, and among these only tensors that
held neither when this process started.
"""

from collections.abc import Iterable
from math import prod

import numpy as np
import numpy.typing as npt
import torch

from everstep import device, parameter_names, state
from everstep.sharded import local_of
from everstep.tracked import Tracked
from everstep_contract import wire
from everstep_contract.manifest import ITEM_BYTES

Bytes = npt.NDArray[np.uint8]
SHOWN = 20
"""How many bad tensors a save names at most."""
BLOCK_BYTES = 1 << 20
_WHOLE = {"float32": np.float32, "float64": np.float64, "complex64": np.float32, "complex128": np.float64}  # fmt: skip
"""Types whose sum is computed as fast as memory is read."""
_LIMITS: dict[str, tuple[type[np.unsignedinteger], int]] = {
    "float64": (np.uint64, 0xFFE0 << 48),
    "complex128": (np.uint64, 0xFFE0 << 48),
    "float32": (np.uint32, 0xFF00 << 16),
    "complex64": (np.uint32, 0xFF00 << 16),
    "bfloat16": (np.uint16, 0xFF00),
    "float16": (np.uint16, 0xF800),
    "float8_e5m2": (np.uint8, 0xF8),
    "float8_e4m3fn": (np.uint8, 0xFE),
}
"""A number is NaN or infinite if its bits, shifted left by one so that the sign is gone, reach this limit."""


class FiniteCheck:
    def __init__(self, tracked: Tracked) -> None:
        self._tracked = tracked
        self._parameters: dict[str, set[str]] = {}
        """Module → the names of its parameters in its state."""
        self.since_start: frozenset[str] = frozenset()
        """Tensors that were NaN or infinite before the first step of this process."""

    def note_start(self, tensors: state.Tensors) -> None:
        counted = ((n, local_of(t)) for n, t in tensors.items() if self._counts(n))
        self.since_start = frozenset(n for n, t in counted if not _is_finite_tensor(t))

    def list_bad(self, staged: Iterable[wire.StagedTensor], room: Bytes) -> tuple[str, ...]:
        """Return the names of the tensors of a staged copy that should be finite and are not."""
        found = [
            t.name
            for t in staged
            if self._counts(t.name)
            and t.name not in self.since_start
            and not is_finite(room[t.at : t.at + prod(t.lengths) * ITEM_BYTES[t.dtype]], t.dtype)
        ]
        return tuple(found[:SHOWN])

    def _counts(self, name: str) -> bool:
        owner, _, key = name.partition("/")
        kind, thing = self._tracked.objects.get(owner, ("", None))
        if kind == "module":
            return key in self._list_parameters(owner, thing)
        return kind == "optimizer" or (kind == "tensor" and bool(thing.requires_grad))

    def _list_parameters(self, owner: str, module: torch.nn.Module) -> set[str]:
        if owner not in self._parameters:
            own = [n for n, _ in module.named_parameters(remove_duplicate=False)]
            short = parameter_names.canonical([*own, *(n for n, _ in module.named_buffers())])
            self._parameters[owner] = {short[n] for n in own}
        return self._parameters[owner]


def is_finite(raw: Bytes, dtype: str) -> bool:
    """Whether none of the numbers is NaN or infinite. Types that have no such values are always finite.

    A finite sum proves it in one pass. A sum that is not finite may have
    overflowed; then the bits decide.
    """
    if dtype not in _LIMITS:
        return True
    if dtype in _WHOLE:
        with np.errstate(all="ignore"):
            if np.isfinite(raw.view(_WHOLE[dtype]).sum()):
                return True
    kind, limit = _LIMITS[dtype]
    bits, count = raw.view(kind), BLOCK_BYTES // np.dtype(kind).itemsize
    blocks = (bits[first : first + count] for first in range(0, len(bits), count))
    return all(int(np.left_shift(block, 1).max()) < limit for block in blocks)


def _is_finite_tensor(tensor: torch.Tensor) -> bool:
    if tensor.device.type != "cpu":
        return bool(torch.isfinite(tensor).all())
    raw: Bytes = device.bytes_of(tensor).numpy()
    return is_finite(raw, state.dtype_name(tensor.dtype))

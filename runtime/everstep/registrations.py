"""Watches what is registered in any module of this process. Registrations are counted, so modules are
listed again only after one of them may have changed. Modules that sum gradients themselves are refused.
"""

import functools
import sys
from typing import Any

from torch.nn.modules import module as of_torch
from torch.nn.parallel import DistributedDataParallel

from everstep.errors import Misuse

_count = 0


def count() -> int:
    """Number of registrations since the first call."""
    _watch()
    return _count


@functools.cache
def refuse_wrappers() -> None:
    """From now on, a script that wraps a module in DistributedDataParallel or FullyShardedDataParallel gets
    `Misuse`. These would use Everstep's group, and sum gradients in it beside Everstep.
    """
    of_torch.register_module_module_registration_hook(_refuse_wrapper)


def describe_wrapper(module: Any) -> str:
    """What to do instead of this module; empty: it is none that sums gradients itself."""
    if isinstance(module, DistributedDataParallel):
        return (
            "DistributedDataParallel sums the gradients of all ranks, which Everstep does: leave it out, and compute "
            "with the model itself"
        )
    loaded = sys.modules.get("torch.distributed.fsdp")  # it takes long to import
    fsdp: Any = getattr(loaded, "FullyShardedDataParallel", None)
    if fsdp is not None and isinstance(module, fsdp):
        return (
            "FullyShardedDataParallel divides the model and sums gradients over all ranks, beside Everstep: use "
            'fully_shard(layer, mesh=job.mesh["shard"]), see "Sharded models" in examples/README.md'
        )
    return ""


@functools.cache
def _watch() -> None:
    of_torch.register_module_parameter_registration_hook(_add)
    of_torch.register_module_module_registration_hook(_add)


def _add(*_: Any) -> None:
    global _count
    _count += 1


def _refuse_wrapper(module: Any, *_: Any) -> None:
    if problem := describe_wrapper(module):
        raise Misuse(problem)

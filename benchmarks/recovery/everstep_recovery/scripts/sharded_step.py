"""A model that is sharded with FSDP2, in the form that `ddp_step.accumulate` expects, for the
scripts of the peers.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from everstep_recovery import layers, workload


class Sharded:
    """Gradients are reduced with the last micro-batch of a step, which is torch's way to accumulate
    them.
    """

    def __init__(self, mesh: Any) -> None:
        self.model: Any = workload.build_model()
        layers.shard_model(self.model, mesh)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.model(rows)
        return found

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self.model.set_requires_gradient_sync(False)
        yield
        self.model.set_requires_gradient_sync(True)

    def list_layers(self) -> list[Any]:
        """The modules that reduce gradients of their own."""
        return [m for m in self.model.modules() if hasattr(m, "set_all_reduce_hook")]

"""A script whose model is sharded over a unit, and what it is compared with."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from everstep import Job

WIDTH = 6


def a_dataset(size: int = 60) -> torch.utils.data.TensorDataset:
    inputs = torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True).tanh())


class Layers(nn.Module):
    """Its last layer is so small that some ranks of a unit of four hold nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.out(inputs + self.down(self.up(inputs).tanh()))


class Mixed(nn.Module):
    """`plain` is not sharded, and has buffers; `narrow` is in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Sequential(nn.Linear(WIDTH, 5), nn.BatchNorm1d(5), nn.Linear(5, WIDTH))
        self.narrow = nn.Linear(WIDTH, 8, dtype=torch.bfloat16)
        self.sharded = Layers()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        narrow = self.narrow(inputs.to(torch.bfloat16)).float().sum(1, keepdim=True)
        return self.sharded(self.plain(inputs)) + narrow


def build() -> nn.ModuleDict:
    torch.manual_seed(3)
    return nn.ModuleDict({"sharded": Layers(), "mixed": Mixed()})


def loss_of(model: nn.Module, batch: Any, names: tuple[str, ...]) -> torch.Tensor:
    inputs, wanted = batch
    return sum((nn.functional.mse_loss(model[n](inputs), wanted) for n in names), torch.zeros(()))


def shard(layers: nn.Module, mesh: Any) -> None:
    """As FSDP2's users do: each layer, then the rest."""
    from torch.distributed.fsdp import fully_shard

    for layer in (layers.up, layers.down, layers):
        fully_shard(layer, mesh=mesh)


def divide(layers: nn.Module, mesh: Any) -> None:
    """As users of tensor parallelism do."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    parallelize_module(layers, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def sum_alone(
    model: nn.Module, dataset: Any, ids: Iterator[list[int]], names: tuple[str, ...]
) -> dict[str, torch.Tensor]:
    """The gradients of the mean loss over these micro-batches, in one process."""
    batches = [dataset[torch.tensor(own)] for own in ids]
    total = sum(len(inputs) for inputs, _ in batches)
    for batch in batches:
        (loss_of(model, batch, names) * (len(batch[0]) / total)).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor that is divided within the unit."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def ids_of(job: Job, data: Any, first: int) -> Iterator[list[int]]:
    return (data.ids(first, index) for index in range(data.micro_batches))

"""The model that `bench-recovery` and `bench-steady` train, without any system's library."""

from collections.abc import Callable
from typing import Any

import torch


def build_model(width: int, layers: int) -> torch.nn.Module:
    """`layers` times Linear(width, width) with tanh; the same parameters in each process."""
    torch.manual_seed(0)
    parts = [torch.nn.Linear(width, width) for _ in range(layers)]
    return torch.nn.Sequential(*(part for layer in parts for part in (layer, torch.nn.Tanh())))


def shard_model(model: torch.nn.Module, mesh: Any) -> None:
    """Shard the model with FSDP2, layer by layer. `mesh`: torch's mesh of the ranks that shard it;
    for HSDP, also of the copies.
    """
    from torch.distributed.fsdp import fully_shard

    for layer in model.children():
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def compute_loss(model: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(rows).square().mean()
    return loss

"""Training under stock DistributedDataParallel, shared by the scripts of the peers; and a rank's share of a step."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from torch.nn.parallel import DistributedDataParallel

from everstep_recovery import checkpoint, layers, workload
from everstep_recovery.workload import MICRO_BATCH, MICRO_BATCHES


class Wrapped(Protocol):
    """A model that reduces its gradients in backward, unless within `no_sync`."""

    def __call__(self, rows: torch.Tensor, /) -> torch.Tensor: ...

    def no_sync(self) -> contextlib.AbstractContextManager[None]: ...


def accumulate(
    wrapped: Wrapped,
    data: workload.Numbers,
    log: workload.StepLog,
    step: int,
    rank: int,
    world: int,
) -> list[int]:
    """Run this rank's micro-batches and reduce with the last one. Returns the dataset indices."""
    used: list[int] = []
    for number in range(MICRO_BATCHES):
        indices = list_indices(step, number, rank, world)
        rows = torch.stack([data[i][1] for i in indices])
        last = number + 1 == MICRO_BATCHES
        with log.one_pass(), contextlib.nullcontext() if last else wrapped.no_sync():
            loss = layers.compute_loss(wrapped, rows) / MICRO_BATCHES
            loss.backward()  # type: ignore[no-untyped-call]
        used += indices
    return used


def list_indices(step: int, number: int, rank: int, world: int) -> list[int]:
    """Dataset indices of a rank's micro-batch `number` of a step; steps count from 1.

    They are those that a DistributedSampler without shuffle draws: rank, rank + world, …
    """
    first = ((step - 1) * MICRO_BATCHES + number) * MICRO_BATCH
    return [place * world + rank for place in range(first, first + MICRO_BATCH)]


def take_steps(
    wrapped: Wrapped,
    optimizer: torch.optim.Optimizer,
    first: int,
    rank: int,
    world: int,
    save: Callable[[int], None],
) -> None:
    """Take the steps from `first` to the last one. `save` is called with the step, at an interval,
    on each rank.
    """
    data, log = workload.Numbers(), workload.StepLog()
    for step in range(first, workload.steps() + 1):
        optimizer.zero_grad()
        used = accumulate(wrapped, data, log, step, rank, world)
        optimizer.step()
        log.step(step, rank, world, used)
        if step % workload.SAVE_EVERY == 0:
            save(step)


def train(path: Path, rank: int, world: int) -> None:
    """Take all steps, starting from the checkpoint at `path` if there is one. Rank 0 saves at an
    interval. The default process group must exist.
    """
    model = workload.build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=workload.LEARNING_RATE)
    first = checkpoint.load(path, model, optimizer)

    def save(step: int) -> None:
        if rank == 0:
            checkpoint.save(path, model, optimizer, step)

    take_steps(DistributedDataParallel(model), optimizer, first, rank, world, save)

"""One step's gradients under DistributedDataParallel, shared by the torchrun and torchft loops."""

import torch
from torch.nn.parallel import DistributedDataParallel

from everstep_recovery import workload
from everstep_recovery.workload import MICRO_BATCH, MICRO_BATCHES


def accumulate(
    wrapped: DistributedDataParallel, data: workload.Numbers, step: int, rank: int, world: int
) -> list[int]:
    """Run this rank's micro-batches, reducing with the last; returns the dataset indices used."""
    used: list[int] = []
    for number in range(MICRO_BATCHES):
        indices = list_indices(step, number, rank, world)
        rows = torch.stack([data[i][1] for i in indices])
        loss = workload.compute_loss(wrapped, rows) / MICRO_BATCHES
        if number + 1 < MICRO_BATCHES:
            with wrapped.no_sync():
                loss.backward()  # type: ignore[no-untyped-call]
        else:
            loss.backward()  # type: ignore[no-untyped-call]
        used += indices
    return used


def list_indices(step: int, number: int, rank: int, world: int) -> list[int]:
    """Dataset indices of a rank's micro-batch `number` of a step; steps count from 1.

    They are those that a DistributedSampler without shuffle draws: rank, rank + world, …
    """
    first = ((step - 1) * MICRO_BATCHES + number) * MICRO_BATCH
    return [place * world + rank for place in range(first, first + MICRO_BATCH)]

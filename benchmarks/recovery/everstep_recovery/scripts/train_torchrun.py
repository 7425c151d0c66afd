"""The training script under torchrun: stock DDP; all ranks restart from the newest checkpoint."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from everstep_recovery import workload
from everstep_recovery.scripts.ddp_step import accumulate

CHECKPOINT = Path(os.environ[workload.OUT], "checkpoint.pt")


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = workload.build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=workload.LEARNING_RATE)
    first = load(model, optimizer)
    wrapped = DistributedDataParallel(model)
    data, log = workload.Numbers(), workload.StepLog()
    for step in range(first, workload.steps() + 1):
        optimizer.zero_grad()
        used = accumulate(wrapped, data, step, rank, world)
        optimizer.step()
        log.step(step, rank, world, used)
        if step % workload.SAVE_EVERY == 0 and rank == 0:
            save(model, optimizer, step)
    dist.destroy_process_group()


def save(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    part = CHECKPOINT.with_suffix(".part")
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, part
    )
    part.rename(CHECKPOINT)


def load(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the checkpoint, if there is one; returns the first step to take."""
    if not CHECKPOINT.exists():
        return 1
    held = torch.load(CHECKPOINT)
    model.load_state_dict(held["model"])
    optimizer.load_state_dict(held["optimizer"])
    return int(held["step"]) + 1


main()

"""The training script under torchrun: stock DDP; all ranks restart from the newest checkpoint."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from everstep_recovery import checkpoint, workload
from everstep_recovery.scripts.ddp_step import accumulate

CHECKPOINT = Path(os.environ[workload.OUT], "checkpoint.pt")


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = workload.build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=workload.LEARNING_RATE)
    first = checkpoint.load(CHECKPOINT, model, optimizer)
    wrapped = DistributedDataParallel(model)
    data, log = workload.Numbers(), workload.StepLog()
    for step in range(first, workload.steps() + 1):
        optimizer.zero_grad()
        used = accumulate(wrapped, data, step, rank, world)
        optimizer.step()
        log.step(step, rank, world, used)
        if step % workload.SAVE_EVERY == 0 and rank == 0:
            checkpoint.save(CHECKPOINT, model, optimizer, step)
    dist.destroy_process_group()


main()

"""The training script under torchrun: stock DDP; all ranks restart from the newest checkpoint."""

import os
from pathlib import Path

import torch
import torch.distributed as dist

from everstep_recovery import workload
from everstep_recovery.scripts import ddp_step

CHECKPOINT = Path(os.environ[workload.OUT], "checkpoint.pt")


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ddp_step.train(CHECKPOINT, dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()


main()

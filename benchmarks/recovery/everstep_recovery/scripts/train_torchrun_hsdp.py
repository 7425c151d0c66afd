"""The training script under torchrun, sharded with torch's HSDP. All ranks restart from the newest
checkpoint of torch.distributed.checkpoint, to which each rank writes its shards.
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torch.distributed.device_mesh import init_device_mesh

from everstep_recovery import workload
from everstep_recovery.scripts.ddp_step import take_steps
from everstep_recovery.scripts.sharded_step import Sharded

FOLDER = Path(os.environ[workload.OUT], "checkpoints")
NEWEST = FOLDER / "newest"
"""File with the step of the newest complete checkpoint."""


def load(wrapped: Sharded) -> int:
    """Load the newest checkpoint, if there is one. Returns the first step to take. SGD without
    momentum has no state of its own.
    """
    if not NEWEST.exists():
        return 1
    step = int(NEWEST.read_text())
    held = wrapped.model.state_dict()
    load_shards({"model": held}, checkpoint_id=str(FOLDER / str(step)))
    wrapped.model.load_state_dict(held)
    return step + 1


def save(wrapped: Sharded, step: int) -> None:
    save_shards({"model": wrapped.model.state_dict()}, checkpoint_id=str(FOLDER / str(step)))
    if dist.get_rank() == 0:
        part = NEWEST.with_suffix(".part")
        part.write_text(str(step))
        part.rename(NEWEST)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world, over = dist.get_rank(), dist.get_world_size(), workload.read_shard()
    mesh = init_device_mesh("cpu", (world // over, over), mesh_dim_names=("replicate", "shard"))
    wrapped = Sharded(mesh)
    optimizer = torch.optim.SGD(wrapped.model.parameters(), lr=workload.LEARNING_RATE)
    first = load(wrapped)
    take_steps(wrapped, optimizer, first, rank, world, lambda step: save(wrapped, step))
    dist.destroy_process_group()


main()

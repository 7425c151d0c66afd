"""The training loop under torch's hybrid sharding (HSDP): some ranks shard a copy with FSDP2, and
there are several copies.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from everstep_recovery import layers
from everstep_steady import workload
from everstep_steady.train_torch import train


def shard(model: torch.nn.Module) -> torch.nn.Module:
    over = workload.read_shard()
    shape = (dist.get_world_size() // over, over)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    layers.shard_model(model, mesh)
    return model


train(shard)

"""The training script under torchft, sharded: the ranks of a replica group shard the model with
FSDP2, and a hook on each layer reduces the shards over the groups, as torchft's own test and
torchtitan do.

`supervise_torchft.py` starts it.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torchft import ProcessGroupGloo

from everstep_recovery import workload
from everstep_recovery.scripts import torchft_step
from everstep_recovery.scripts.sharded_step import Sharded


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    over = dist.get_world_size()
    wrapped = Sharded(init_device_mesh("cpu", (over,), mesh_dim_names=("shard",)))

    # A rank sends its own shards to the rank at the same place in the group that comes back.
    def load(held: dict[str, Any]) -> None:
        with torch.no_grad():
            for name, parameter in wrapped.model.named_parameters():
                parameter.to_local().copy_(held[name])

    def save() -> dict[str, Any]:
        return {n: p.detach().to_local() for n, p in wrapped.model.named_parameters()}

    group = ProcessGroupGloo(timeout=torchft_step.GROUP_TIMEOUT)
    manager = torchft_step.build_manager(group, load, save)

    def reduce(output: torch.Tensor) -> None:
        manager.allreduce(output).wait()

    for layer in wrapped.list_layers():
        layer.set_all_reduce_hook(reduce)
    optimizer = torch.optim.SGD(wrapped.model.parameters(), lr=workload.LEARNING_RATE)
    torchft_step.train(manager, wrapped, optimizer, dist.get_rank(), over)


main()

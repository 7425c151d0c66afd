"""The training script under torchft, sharded: a replica group's ranks shard its model with FSDP2, and a hook on
each layer reduces the shards over the groups, as torchft's own test and torchtitan do it.

`supervise_torchft.py` starts it.
"""

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torchft import Manager, ProcessGroupGloo

from everstep_recovery import workload
from everstep_recovery.scripts.ddp_step import accumulate
from everstep_recovery.scripts.sharded_step import Sharded

REPLICA, REPLICAS = int(os.environ["REPLICA"]), int(os.environ["REPLICAS"])
GROUP_TIMEOUT = timedelta(milliseconds=int(os.environ["COLLECTIVE_MS"]))


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    over = dist.get_world_size()
    wrapped = Sharded(init_device_mesh("cpu", (over,), mesh_dim_names=("shard",)))

    # A rank sends its own shards to the rank of the same place in the group that comes back.
    def load(held: dict[str, Any]) -> None:
        with torch.no_grad():
            for name, parameter in wrapped.model.named_parameters():
                parameter.to_local().copy_(held[name])

    def save() -> dict[str, Any]:
        return {n: p.detach().to_local() for n, p in wrapped.model.named_parameters()}

    manager = Manager(
        pg=ProcessGroupGloo(timeout=GROUP_TIMEOUT),
        load_state_dict=load,
        state_dict=save,
        min_replica_size=1,
        hostname="127.0.0.1",
        lighthouse_addr=os.environ["TORCHFT_LIGHTHOUSE"],
        replica_id=f"replica_{REPLICA}_",
        heartbeat_interval=timedelta(milliseconds=int(os.environ["HEARTBEAT_MS"])),
        init_sync=False,
    )

    def reduce(output: torch.Tensor) -> None:
        manager.allreduce(output).wait()

    for layer in wrapped.list_layers():
        layer.set_all_reduce_hook(reduce)
    train(manager, wrapped, dist.get_rank(), over)


def train(manager: Manager, wrapped: Sharded, place: int, over: int) -> None:
    optimizer = torch.optim.SGD(wrapped.model.parameters(), lr=workload.LEARNING_RATE)
    data, log = workload.Numbers(), workload.StepLog()
    while manager.current_step() < workload.steps():
        manager.start_quorum()
        optimizer.zero_grad()
        # As in train_torchft.py: the position in the data follows from the step.
        manager.wait_quorum()
        step = manager.current_step() + 1
        used = accumulate(wrapped, data, log, step, REPLICA * over + place, REPLICAS * over)
        group, groups, part = (
            manager.participating_rank(), manager.num_participants(), manager.is_participating()
        )  # fmt: skip
        if manager.should_commit():
            optimizer.step()
            if part and group is not None:
                log.step(step, group * over + place, groups * over, used)


main()

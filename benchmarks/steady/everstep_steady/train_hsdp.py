"""The same training loop under torch's own hybrid sharding (HSDP): FSDP2 over some ranks, and copies of them.

The environment must have RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from everstep_steady import workload


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    shard = workload.read_shard()
    shape = (dist.get_world_size() // shard, shard)
    model = workload.build_model()
    workload.shard_model(
        model, init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=workload.LEARNING_RATE)
    data = workload.Numbers()
    sampler: DistributedSampler[torch.Tensor] = DistributedSampler(data)
    loader = DataLoader(
        data, batch_size=workload.BATCH, sampler=sampler, collate_fn=torch.stack, drop_last=True
    )
    clock = workload.Clock(dist.get_rank())
    epochs = workload.MOST_STEPS // len(loader)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            workload.compute_loss(model, batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            clock.tick()
    dist.destroy_process_group()


main()

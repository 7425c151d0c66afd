"""The same training loop without Everstep, for torch's own systems.

The environment must contain RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from everstep_recovery import layers
from everstep_steady import workload


def train(prepare: Callable[[torch.nn.Module], torch.nn.Module]) -> None:
    """Run the loop. `prepare` turns the model that this rank has built into the one that all ranks
    train together.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = prepare(workload.build_model())
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
            layers.compute_loss(model, batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            clock.tick()
    dist.destroy_process_group()

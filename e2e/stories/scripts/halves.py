"""Like tiny.py, but two ranks together hold the model: FSDP2 over `job.mesh["shard"]`."""

import os
import time

import torch
from tiny import build_dataset
from torch.distributed.fsdp import fully_shard

import everstep

SECONDS = float(os.environ.get("TINY_SECONDS", "0.08"))


def main(job: everstep.Job) -> None:
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1)
    )
    fully_shard(model, mesh=job.mesh["shard"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    job.track(model=model, optimizer=optimizer)
    data = job.batches(build_dataset(), global_batch=8, micro_batch=2)
    for step in job.steps(until=1_000_000):
        for inputs, targets in step.batches(data):
            step.backward(torch.nn.functional.mse_loss(model(inputs), targets))
        time.sleep(SECONDS)
        optimizer.step()


everstep.run(main)

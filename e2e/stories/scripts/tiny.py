"""A minimal training script: TINY_STEPS steps of about TINY_SECONDS each, on 8 of 512 samples."""

import os
import time

import torch
from torch.utils.data import TensorDataset

import everstep

STEPS = int(os.environ.get("TINY_STEPS", "1000000"))
SECONDS = float(os.environ.get("TINY_SECONDS", "0.08"))


def build_dataset() -> TensorDataset:
    chance = torch.Generator().manual_seed(7)
    inputs = torch.randn(512, 16, generator=chance)
    return TensorDataset(inputs, inputs @ torch.randn(16, 1, generator=chance))


def main(job: everstep.Job) -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    job.track(model=model, optimizer=optimizer)
    data = job.batches(build_dataset(), global_batch=8, micro_batch=2)
    for step in job.steps(until=STEPS):
        for inputs, targets in step.batches(data):
            step.backward(torch.nn.functional.mse_loss(model(inputs), targets))
        time.sleep(SECONDS)
        optimizer.step()


if __name__ == "__main__":
    everstep.run(main)

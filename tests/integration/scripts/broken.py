"""A training script with a mistake: it raises an exception in its third step."""

import torch
from torch.utils.data import TensorDataset

import everstep


def main(job: everstep.Job) -> None:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    job.track(model=model, optimizer=optimizer)
    data = job.batches(TensorDataset(torch.randn(64, 4)), global_batch=4, micro_batch=4)
    for step in job.steps(until=10):
        for (inputs,) in step.batches(data):
            step.backward(model(inputs).square().mean())
        optimizer.step()
        if step.number == 3:
            raise KeyError("no such column: labels")


everstep.run(main)

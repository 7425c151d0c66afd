"""Trains 60 steps (or PACED_STEPS) of at least 20 ms, long enough to lose the coordinator and get another one."""

import os
import time
from collections.abc import Callable

import torch

from everstep import Job, run

STEPS = int(os.environ.get("PACED_STEPS", "60"))


def main(
    job: Job,
    until: int = STEPS,
    after: Callable[[int], None] = lambda step: time.sleep(0.02),
) -> None:
    """`after`: called at the end of each step, with its number."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    job.track(model=model, optimizer=optimizer)
    data = job.batches(list(range(1000)), global_batch=4, micro_batch=2)
    for step in job.steps(until=until):
        for batch in step.batches(data):
            step.backward(model(torch.tensor([[i / 1e3, 1.0] for i in batch])).mean())
        optimizer.step()
        after(step.number)


if __name__ == "__main__":
    run(main, seed=2)

"""A small correct training script. Each other script has the mistake that its name says."""

import sys

import torch

import everstep

WIDTH = int(sys.argv[1]) if sys.argv[1:] else 4


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((WIDTH,), float(index))


def build(job: everstep.Job) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(WIDTH, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    job.track(model=model, optimizer=optimizer)
    return model, optimizer


def main(job: everstep.Job) -> None:
    model, optimizer = build(job)
    data = job.batches(Numbers(), global_batch=8, micro_batch=4)
    for step in job.steps(until=8):
        for batch in step.batches(data):
            step.backward(model(batch).square().mean())
        optimizer.step()


if __name__ == "__main__":
    everstep.run(main)

"""A training script with occasional slow steps: slow data, garbage collection, other shapes, saves,
evaluations, and an unannounced pause. Delays between steps begin at step 60, when the ranks have
learnt their limits.
"""

import gc
import os
import time
from pathlib import Path

import torch

import everstep

WIDTH, LAYERS = 256, 8
SAMPLES = 1_000_000
PROGRESS = "EVERSTEP_HANG_PROGRESS"
"""Environment variable: the file for the number of the last step."""
MOST_STEPS = 10**8
SLOW_FROM = 60


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    """Every 20,000th sample takes a second to read."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        if index % 20_000 == 19_999:
            time.sleep(1.0)
        return torch.full((WIDTH,), (index % 97) / 97)


def be_slow(step: int, rank: int) -> None:
    """Spend extra time between two steps."""
    if step < SLOW_FROM:
        return
    if step % 100 == rank:
        garbage = [[i] for i in range(200_000)]
        del garbage
        gc.collect()
    if step % 500 == 0:
        time.sleep(2.0)  # on all ranks, like an export without job.pause


def main(job: everstep.Job) -> None:
    torch.set_num_threads(1)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    model = torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.Tanh())))
    optimizer = torch.optim.Adam(model.parameters())
    job.track(model=model, optimizer=optimizer)
    data = job.batches(Numbers(), global_batch=64, micro_batch=8, shuffle=False)
    held_out = job.batches(torch.randn(64, WIDTH), global_batch=32, micro_batch=8, name="held-out")
    progress = Path(os.environ[PROGRESS])
    written = progress.with_suffix(".new")
    for step in job.steps(until=MOST_STEPS):
        for rows in step.batches(data):
            rows = rows if step.number % 50 else rows[:5]  # another shape
            step.backward(model(rows).square().mean())
        optimizer.step()
        be_slow(step.number, job.rank)
        if job.rank == 0:
            written.write_text(str(step.number))
            written.replace(progress)  # a reader never finds an empty file
        if step.number % 200 == 0:
            with torch.no_grad():
                job.sum(sum(float(model(rows).mean()) for rows in job.evaluate(held_out)))


everstep.run(main, seed=0)

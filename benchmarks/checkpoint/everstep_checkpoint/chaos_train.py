"""The training script of `chaos_job.py`: a few steps, whose result depends on each of them."""

import sys
import time
from pathlib import Path

import torch

import everstep

STEPS = 8
FOLDER = Path(sys.argv[1])


def main(job: everstep.Job) -> None:
    torch.set_num_threads(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1)
    )
    optimizer = torch.optim.Adam(model.parameters())
    job.track(model=model, optimizer=optimizer)
    data = job.batches(torch.randn(256, 64), global_batch=8, micro_batch=4)
    began = None
    for step in job.steps(until=STEPS):
        began = step.number - 1 if began is None else began
        for rows in step.batches(data):
            step.backward(model(rows).square().mean())
            time.sleep(0.05)  # in a real job, saves come more slowly than the store accepts them
        optimizer.step()
    (FOLDER / "began").write_text(str(STEPS if began is None else began))
    final = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    (FOLDER / "final.bin").write_bytes(final)


everstep.run(main, seed=0)

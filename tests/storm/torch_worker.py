"""A worker of the storm with torch: it trains a small model and writes a record for the witness."""

import hashlib
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

import everstep
from storm.record import Record

STEPS = int(os.environ["STORM_STEPS"])
STEP_SECONDS = 0.25
SAMPLES = 1000


class Rows(torch.utils.data.Dataset[tuple[int, torch.Tensor]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        made = torch.Generator().manual_seed(index)
        return index, torch.randn(8, generator=made)


def digest_of(model: torch.nn.Module) -> str:
    """The digest of the parameters. The optimizer's state is compared in the last checkpoint."""
    found = hashlib.sha256()
    for name, value in model.state_dict().items():
        found.update(name.encode() + value.numpy().tobytes())
    return found.hexdigest()[:16]


def main(job: everstep.Job) -> None:
    torch.manual_seed(int(os.environ["STORM_SEED"]))
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    job.track(model=model, optimizer=optimizer)
    data = job.batches(Rows(), global_batch=6, micro_batch=2)
    record: Record | None = None
    for step in job.steps(until=STEPS):
        if record is None:
            start = job._session.start
            record = Record(
                epoch=start.epoch,
                rank=start.rank,
                world=start.world,
                start=start.applied,
                digest=digest_of(model),
            )
        time.sleep(STEP_SECONDS)
        for samples, rows in step.batches(data):
            record.used(step.number, tuple(int(s) for s in samples))
            step.backward(((model(rows) - rows) ** 2).mean())
        optimizer.step()
        record.applied(step.number, digest_of(model))


everstep.run(main)

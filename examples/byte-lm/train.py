"""A small byte-level transformer learns to write Python from the sources of the standard library."""

import os
import sysconfig
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import everstep

STEPS = int(os.environ.get("BYTE_LM_STEPS", "300"))
LOG = os.environ.get("BYTE_LM_LOG", "")
"""A folder in which each rank logs the steps that it has applied; empty: no log."""
CONTEXT, WIDTH, HEADS, LAYERS = 64, 160, 4, 3


class Text(torch.utils.data.Dataset):
    """Windows of CONTEXT + 1 bytes, from the first 4 MB of the library's modules in alphabetical order."""

    def __init__(self) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        raw = b"\n".join(file.read_bytes() for file in files)[: 4 << 20]
        self.bytes = torch.frombuffer(bytearray(raw), dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // CONTEXT

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.bytes[index * CONTEXT : (index + 1) * CONTEXT + 1].long()


class ByteLM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        hidden = self.bytes(text) + self.places.weight
        return self.head(self.layers(hidden, mask=self.mask, is_causal=True))


def main(job: everstep.Job) -> None:
    torch.set_num_threads(1)
    model = ByteLM().to(job.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    job.track(model=model, optimizer=optimizer, schedule=schedule)
    data = job.batches(Text(), global_batch=12, micro_batch=2)

    for step in job.steps(until=STEPS):
        for text in step.batches(data):
            text = text.to(job.device)
            guess = model(text[:, :-1])
            step.backward(functional.cross_entropy(guess.flatten(0, 1), text[:, 1:].flatten()))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if LOG:
            note(job.rank, step)
        if job.is_first and step.number % 10 == 0:
            print(f"step {step.number:4d}  loss {step.loss:.4f}")


def note(rank: int, step: everstep.Step) -> None:
    """Append one line: step, loss (exact), seconds of the machine's monotonic clock, process id."""
    with Path(LOG, f"rank-{rank}").open("a") as file:
        file.write(f"{step.number} {float(step.loss).hex()} {time.monotonic()} {os.getpid()}\n")


# exact_reduction: the same bits for any number of ranks, for twice the bytes on the network.
everstep.run(main, seed=0, exact_reduction=True)

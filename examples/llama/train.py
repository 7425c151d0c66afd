"""A small Llama learns to write Python from the sources of the standard library, sharded over the
ranks of a unit.

The model is plain torch: FSDP2 over `job.mesh["shard"]`, tensor and sequence parallel over
`job.mesh["tensor"]`, bfloat16 with sums in float32, activation checkpointing. Everstep runs the
copies of the unit and sums their gradients.
"""

import math
import os
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import everstep

STEPS = int(os.environ.get("LLAMA_STEPS", "40"))
WARM_UP = 10
COMPILE = os.environ.get("LLAMA_COMPILE", "") == "1"
"""Compile each block: faster on a GPU; on a CPU the compilation takes longer than the full run."""
CONTEXT, WIDTH, HEADS, KEY_HEADS, LAYERS, HIDDEN = 64, 128, 8, 4, 2, 352
HEAD_WIDTH = WIDTH // HEADS
GLOBAL_BATCH, MICRO_BATCH = 16, 4


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


def turns(length: int) -> torch.Tensor:
    """RoPE's rotations as complex numbers, shape [length, HEAD_WIDTH / 2]."""
    speeds = 10_000.0 ** -(torch.arange(0, HEAD_WIDTH, 2) / HEAD_WIDTH)
    angles = torch.outer(torch.arange(length), speeds)
    return torch.polar(torch.ones_like(angles), angles)


def rotate(heads: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """`heads`: [batch, length, heads, HEAD_WIDTH]."""
    pairs = torch.view_as_complex(heads.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * by[:, None]).flatten(-2).type_as(heads)


class Attention(nn.Module):
    """Grouped-query: each key head serves HEADS / KEY_HEADS query heads."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, HEADS * HEAD_WIDTH, bias=False)
        self.key = nn.Linear(WIDTH, KEY_HEADS * HEAD_WIDTH, bias=False)
        self.value = nn.Linear(WIDTH, KEY_HEADS * HEAD_WIDTH, bias=False)
        self.out = nn.Linear(HEADS * HEAD_WIDTH, WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        # -1, because with tensor parallelism this rank holds only some of the heads.
        query, key, value = (
            layer(hidden).unflatten(-1, (-1, HEAD_WIDTH))
            for layer in (self.query, self.key, self.value)
        )
        by = turns(query.shape[1]).to(hidden.device)
        query, key = rotate(query, by), rotate(key, by)
        mixed = functional.scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in (query, key, value)), is_causal=True, enable_gqa=True
        )
        return self.out(mixed.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(functional.silu(self.gate(hidden)) * self.up(hidden))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(WIDTH), Attention()
        self.feed_norm, self.feed = nn.RMSNorm(WIDTH), FeedForward()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden))
        return hidden + self.feed(self.feed_norm(hidden))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)
        nn.init.normal_(self.bytes.weight, std=0.02)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        hidden = self.bytes(text)
        for block in self.blocks:  # keeps each block's input; backward computes the rest again
            hidden = checkpoint(block, hidden, use_reentrant=False)
        return self.head(self.norm(hidden))


def divide(model: Llama, mesh: DeviceMesh) -> None:
    """Split each layer over the tensor ranks, and each rank's part of it over the shard ranks."""
    if mesh["tensor"].size() > 1:
        by_column, by_row = ColwiseParallel(), RowwiseParallel(output_layouts=Shard(1))
        whole = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
        for block in model.blocks:
            plan = {
                "attention_norm": SequenceParallel(),
                "attention": whole,
                **{f"attention.{name}": by_column for name in ("query", "key", "value")},
                "attention.out": by_row,
                "feed_norm": SequenceParallel(),
                "feed": whole,
                **{f"feed.{name}": by_column for name in ("gate", "up")},
                "feed.down": by_row,
            }
            parallelize_module(block, mesh["tensor"], plan)
        plan = {
            "bytes": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
        parallelize_module(model, mesh["tensor"], plan)
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["shard"], mp_policy=precision)
    fully_shard(model, mesh=mesh["shard"], mp_policy=precision)


def compile_blocks(model: Llama, device: torch.device) -> None:
    """Compile now, with a pass of the shape that the steps have: a rank that replaces a lost one
    then compiles before it joins, while no other rank waits for it.
    """
    for block in model.blocks:
        block.compile(dynamic=False)
    text = torch.zeros(MICRO_BATCH, CONTEXT, dtype=torch.long, device=device)
    model(text).sum().backward()
    model.zero_grad()


def rate(step: int) -> float:
    """The factor of the learning rate: a warm-up, then half a cosine."""
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - WARM_UP) / max(1, STEPS - WARM_UP)))


def main(job: everstep.Job) -> None:
    torch.set_num_threads(1)
    model = Llama().to(job.device)
    divide(model, job.mesh)
    if COMPILE:
        compile_blocks(model, job.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    job.track(model=model, optimizer=optimizer, schedule=schedule)
    data = job.batches(Text(), global_batch=GLOBAL_BATCH, micro_batch=MICRO_BATCH)

    for step in job.steps(until=STEPS):
        for text in step.batches(data):
            text = text.to(job.device)
            guess = model(text[:, :-1])
            loss = functional.cross_entropy(guess.flatten(0, 1).float(), text[:, 1:].flatten())
            step.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if job.is_first and step.number % 10 == 0:
            print(f"step {step.number:4d}  loss {step.loss:.4f}")


if __name__ == "__main__":
    everstep.run(main, seed=0)

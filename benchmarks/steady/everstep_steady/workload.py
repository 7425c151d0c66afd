"""What both sides train: model, data, and the script's clock. It uses neither side's library."""

import os
import time
from pathlib import Path

import numpy as np
import torch

from everstep_recovery import layers

WIDTH = 512
LAYERS = int(os.environ.get("EVERSTEP_STEADY_LAYERS", "16"))
BATCH = 32
"""Samples per rank and step: one micro-batch."""
SAMPLES = 4096
WARM_UP = 20
"""Steps that are not measured: they include first allocations, connections and bucket plans."""
MOST_STEPS = 100_000
"""Training ends when it is stopped, or at this step."""
LEARNING_RATE = 0.01
OUT = "EVERSTEP_STEADY_OUT"
"""Environment variable: the folder for one file of marks per rank."""
EXACT = "EVERSTEP_STEADY_EXACT"
"""Environment variable; not empty: Everstep adds gradients as fixed-point integers."""
SHARD = "EVERSTEP_STEADY_SHARD"
"""Environment variable: ranks per FSDP2-sharded copy of the model; 1: each rank holds all of it."""


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    """[SAMPLES, WIDTH] fixed random numbers; on both sides, a batch is one row selection."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self._rows = torch.randn(SAMPLES, WIDTH, generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._rows[index]

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return list(self._rows[torch.tensor(indices)])


def build_model() -> torch.nn.Module:
    return layers.build_model(WIDTH, LAYERS)


def read_shard() -> int:
    return int(os.environ.get(SHARD, "1"))


TRACE = "EVERSTEP_STEADY_TRACE"
"""Environment variable; not empty: the file for the trace of rank 0."""
TRACED_STEPS = 3


def start_trace(rank: int) -> torch.profiler.profile | None:
    """Start a profiler of the first steps after the warm-up. Its `step` must be called after each
    step. None: no trace is requested from this rank.
    """
    path = os.environ.get(TRACE)
    if not path or rank != 0:
        return None
    found = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        schedule=torch.profiler.schedule(wait=WARM_UP - 1, warmup=1, active=TRACED_STEPS, repeat=1),
        on_trace_ready=lambda profile: profile.export_chrome_trace(path),
    )
    found.start()
    return found


def is_exact() -> bool:
    return bool(os.environ.get(EXACT))


class Clock:
    """Records the end of each step: time and this process's CPU time, in seconds. It writes them to
    a file that the benchmark reads while the training runs (`marks.py`).

    Call `tick` at the end of each step.
    """

    def __init__(self, rank: int) -> None:
        path = Path(os.environ[OUT], f"{rank}-{os.getpid()}.marks")
        self._marks = np.memmap(path, np.float64, "w+", shape=(MOST_STEPS, 2))
        self._count = 0

    def tick(self) -> None:
        self._marks[self._count] = time.monotonic(), time.process_time()
        self._count += 1

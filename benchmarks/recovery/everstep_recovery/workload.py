"""What all systems train, and the log that each rank writes, without any system's library."""

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from everstep_recovery import layers

WIDTH = 512
LAYERS = "EVERSTEP_RECOVERY_LAYERS"
"""Environment variable: how many layers of about 1 MiB the model has."""
FEW_LAYERS = 12
"""Unless that is set: the gradients of these fit into one bucket."""
MICRO_BATCH = 32
MICRO_BATCHES = 2
"""Micro-batches per rank and step, at full size."""
SAMPLES = 100_000_000
"""More than a run uses, so that each sample should be used at most once."""
LEARNING_RATE = 0.01
SAVE_EVERY = 10
"""Steps between checkpoints, for the systems that go back to one."""
OUT = "EVERSTEP_RECOVERY_OUT"
"""Environment variable: the folder for the logs, one file per process."""
STEPS = "EVERSTEP_RECOVERY_STEPS"
EXACT = "EVERSTEP_RECOVERY_EXACT"
"""Environment variable: 1 for Everstep's `exact_reduction`."""
DIGEST_EVERY = "EVERSTEP_RECOVERY_DIGEST_EVERY"
"""Environment variable: steps between two digests of its parameters that a rank logs; 0: none."""
SHARD = "EVERSTEP_RECOVERY_SHARD"
"""Environment variable: ranks per FSDP2-sharded copy of the model; 1: each rank holds all of it."""


class Numbers(torch.utils.data.Dataset[tuple[int, torch.Tensor]]):
    """Items of (index, [WIDTH] numbers that depend only on the index)."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        return index, torch.randn(WIDTH, generator=generator)


def build_model() -> torch.nn.Module:
    return layers.build_model(WIDTH, read_layers())


def read_layers() -> int:
    return int(os.environ.get(LAYERS, FEW_LAYERS))


def read_shard() -> int:
    return int(os.environ.get(SHARD, "1"))


def steps() -> int:
    return int(os.environ[STEPS])


def is_exact() -> bool:
    return os.environ.get(EXACT) == "1"


def compute_digest(model: torch.nn.Module) -> str:
    """A digest of the bytes of all parameters."""
    whole = hashlib.blake2b(digest_size=16)
    for parameter in model.parameters():
        whole.update(parameter.detach().numpy().data)
    return whole.hexdigest()


class StepLog:
    """Writes one line per step, at once.

    Times are CLOCK_MONOTONIC, which all processes of a machine share.
    """

    def __init__(self) -> None:
        path = Path(os.environ[OUT], f"{os.getpid()}.jsonl")
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._passes: list[float] = []
        self._digest_every = int(os.environ.get(DIGEST_EVERY, "0"))
        self._write({"event": "begin"})

    @contextlib.contextmanager
    def one_pass(self) -> Iterator[None]:
        """Measure forward and backward of one micro-batch. The step's line lists the seconds of
        each one.
        """
        began = time.monotonic()
        yield
        self._passes.append(round(time.monotonic() - began, 6))

    def step(self, number: int, rank: int, world: int, samples: Sequence[int]) -> None:
        """Log that this rank applied a step, with its own samples in the gradient."""
        passes, self._passes = self._passes, []
        values = {"step": number, "rank": rank, "world": world, "samples": list(samples)}
        self._write({"event": "step", **values, "passes": passes})

    def state(self, number: int, model: torch.nn.Module) -> None:
        """Log a digest of the state after a step, if one is due."""
        if self._digest_every and number % self._digest_every == 0:
            self._write({"event": "state", "step": number, "digest": compute_digest(model)})

    def _write(self, values: dict[str, object]) -> None:
        line = json.dumps({"t": time.monotonic(), "pid": os.getpid(), **values})
        os.write(self._file, f"{line}\n".encode())

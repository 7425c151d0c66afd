"""What all systems share: the model, its data, and the clock of the training script."""

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

WIDTH = 1024
LAYER_MIB = WIDTH * WIDTH * 4 >> 20
PREFIX = "EVERSTEP_CHECKPOINT_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One run, as the training scripts read it from their environment."""

    mib: int
    """MiB of parameters."""
    batch: int
    """Samples of each rank in a step."""
    steps: int
    every: int
    """Steps from one save to the next."""
    folder: str
    """For the logs of the ranks and for the checkpoints."""

    def to_environ(self) -> dict[str, str]:
        return {PREFIX + "PLAN": json.dumps(asdict(self))}


def read_plan() -> Plan:
    return Plan(**json.loads(os.environ[PREFIX + "PLAN"]))


def build_model(mib: int) -> nn.Module:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(max(1, mib // LAYER_MIB)))
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))


def compute_loss(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(inputs).square().mean()
    return loss


@dataclass(slots=True, kw_only=True)
class Step:
    """When the parts of a step began, in seconds of CLOCK_MONOTONIC. Between `computed` and
    `applying` a system may reduce gradients or wait for a copy. Between `applied` and the next
    step's `began` it may save.
    """

    number: int
    began: float = 0.0
    computed: float = 0.0
    applying: float = 0.0
    applied: float = 0.0
    wall: float = 0.0
    """`applied` as the time of day."""


class Clock:
    """Records the steps of one rank, and writes them to a file at the end."""

    def __init__(self, folder: str, rank: int) -> None:
        self._path = Path(folder) / f"rank-{rank}.json"
        self._steps: list[Step] = []

    def begin(self, number: int) -> None:
        self._steps.append(Step(number=number, began=time.monotonic()))

    def computed(self) -> None:
        self._steps[-1].computed = time.monotonic()

    def applying(self) -> None:
        self._steps[-1].applying = time.monotonic()

    def applied(self) -> None:
        self._steps[-1].applied = time.monotonic()
        self._steps[-1].wall = time.time()  # noqa: TID251 compared with the times of files

    def write(self) -> None:
        self._path.write_text(json.dumps([asdict(step) for step in self._steps]))


def measure_batch(mib: int, seconds: float) -> int:
    """The number of samples with which a pass takes `seconds` or a little longer on one thread."""
    model, batch = build_model(mib), 8
    for _ in range(12):
        spent = min(_measure_pass(model, batch) for _ in range(3))
        if spent >= seconds:
            return batch
        batch = max(batch + 1, min(4 * batch, int(batch * seconds / spent * 1.02)))
    return batch


def _measure_pass(model: nn.Module, batch: int) -> float:
    inputs = torch.randn(batch, WIDTH)
    model.zero_grad()
    started = time.monotonic()
    compute_loss(model, inputs).backward()  # type: ignore[no-untyped-call]
    return time.monotonic() - started


def measure_memcpy(size: int) -> float:
    """Seconds of a memcpy of `size` bytes: the best of five, on pages that were touched before."""
    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
    spent = []
    for _ in range(5):
        started = time.monotonic()
        np.copyto(target, source)
        spent.append(time.monotonic() - started)
    return min(spent)


def measure_tensor_memcpy(mib: int) -> float:
    """The same for the tensors of the model, one after the other, by one thread."""
    into = [tensor.detach() for tensor in build_model(mib).parameters()]
    source, spent = [tensor.clone() for tensor in into], []
    for _ in range(5):
        started = time.monotonic()
        for target, tensor in zip(into, source, strict=True):
            target.copy_(tensor)
        spent.append(time.monotonic() - started)
    return min(spent)


def write_loads(rank: int, spent: Mapping[str, Sequence[float]]) -> None:
    """Write the times of a rank's loads. `spent`: source → seconds of each try to load from it."""
    (Path(read_plan().folder) / f"load-{rank}.json").write_text(json.dumps(spent))

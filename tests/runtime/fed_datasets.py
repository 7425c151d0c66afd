"""Datasets that data workers import by name."""

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from everstep.batches import Batches


def in_data_worker() -> bool:
    return multiprocessing.parent_process() is not None


class Augmented:
    """Samples that depend on the random numbers of torch, numpy and Python. `fetched` counts those of this process."""

    def __init__(self, size: int = 48, seconds: float = 0.0) -> None:
        self.size, self.seconds, self.fetched = size, seconds, 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        self.fetched += 1
        time.sleep(self.seconds)
        return torch.rand(3) + index + float(np.random.rand()) + random.random()


class Deadly(Augmented):
    """Sample 5 ends the data worker that fetches it."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 5 and in_data_worker():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class Broken(Augmented):
    """Sample 5 raises, with `only_there` in a data worker only."""

    def __init__(self, *, only_there: bool) -> None:
        super().__init__()
        self.only_there = only_there

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 5 and (in_data_worker() or not self.only_there):
            raise RuntimeError("sample 5 is broken")
        return super().__getitem__(index)


class Stuck(Augmented):
    """A data worker waits for a file before it fetches any sample but 0."""

    def __init__(self, gate: Path) -> None:
        super().__init__()
        self.gate = gate

    def __getitem__(self, index: int) -> torch.Tensor:
        while index and in_data_worker() and not self.gate.exists():
            time.sleep(0.005)
        return super().__getitem__(index)


class Many(Augmented):
    """Fetches many samples at once, as Hugging Face's datasets do."""

    def __getitem__(self, index: int) -> torch.Tensor:
        raise AssertionError("it has __getitems__")

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        return [{"index": i, "value": torch.rand(2)} for i in indices]


class Unloadable(Augmented):
    def __setstate__(self, state: Any) -> None:
        raise ImportError("no module named 'there'")


class Edited(Augmented):
    """No process can load it once its script was edited."""

    def __init__(self, edited: Path, error: BaseException) -> None:
        super().__init__()
        self.edited, self.error = edited, error

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state)
        if self.edited.exists():
            raise self.error


class Unsendable(Augmented):
    """Its samples cannot be pickled."""

    def __getitem__(self, index: int) -> Any:
        return lambda: index


def first_of(samples: list[Any]) -> Any:
    return samples[0]


def wait_ready(data: Batches) -> None:
    """Wait until every data worker accepts requests."""
    assert data._workers is not None
    while not all(worker.ready for worker in data._workers._workers):
        data._workers._receive(None)

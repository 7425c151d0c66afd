"""Torch is imported once, with one thread; workers are forked from this process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from everstep import defer_dynamo
from runtime.a_job import Trial

torch.set_num_threads(1)
defer_dynamo.defer_compiler()


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    return Trial(tmp_path).track()


@pytest.fixture
def a_trial(tmp_path: Path) -> Callable[..., Trial]:
    def make(**start: Any) -> Trial:
        return Trial(tmp_path, **start)

    return make


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    torch.manual_seed(0)

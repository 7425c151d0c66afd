"""The random states of torch, CUDA, numpy and `random`: capture, restore, seed."""

import random
from typing import Any

import numpy as np
import torch

from everstep import order


def capture() -> dict[str, Any]:
    """All random states of this process; tensors and plain values only."""
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    np.random.set_state(states["numpy"])
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def seed_all(*parts: Any) -> None:
    """Seed every generator from `parts` alone.

    They are seeded one by one, because `torch.manual_seed` formats a stack trace on each call
    while CUDA is not initialised.
    """
    number = order.derive(*parts)
    torch.default_generator.manual_seed(number)
    np.random.seed(number % 2**32)
    random.seed(number)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(number)

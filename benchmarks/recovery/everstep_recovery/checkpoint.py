"""The checkpoints of the scripts that restart from one."""

from pathlib import Path

import torch


def save(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    part = path.with_suffix(".part")
    held = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    torch.save(held, part)
    part.rename(path)


def load(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the checkpoint, if there is one; returns the first step to take."""
    if not path.exists():
        return 1
    held = torch.load(path)
    model.load_state_dict(held["model"])
    optimizer.load_state_dict(held["optimizer"])
    return int(held["step"]) + 1

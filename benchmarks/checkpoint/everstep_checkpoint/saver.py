"""What the benchmark needs of a peer."""

from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import torch


class Saver(Protocol):
    def save(self, path: str, model: torch.nn.Module) -> None: ...

    def guard(self) -> AbstractContextManager[Any]:
        """Around the update: what is not copied yet must not change."""

    def close(self) -> None:
        """Returns when all is written."""

    def load(self, path: str, model: torch.nn.Module) -> None: ...


@runtime_checkable
class MemorySaver(Protocol):
    """It keeps the newest state in memory, too."""

    def recall(self, model: torch.nn.Module) -> None:
        """Load it from there."""

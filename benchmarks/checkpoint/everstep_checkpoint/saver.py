"""What the benchmark needs from a peer."""

from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import torch


class Saver(Protocol):
    def save(self, path: str, model: torch.nn.Module) -> None: ...

    def guard(self) -> AbstractContextManager[Any]:
        """A context for the update: state that is not copied yet must not change."""

    def close(self) -> None:
        """Wait until everything is written."""

    def load(self, path: str, model: torch.nn.Module) -> None: ...


@runtime_checkable
class MemorySaver(Protocol):
    """A saver that also keeps the newest state in memory."""

    def recall(self, model: torch.nn.Module) -> None:
        """Load the state from memory."""

"""DLRover's flash checkpoint, in its own file because it needs another torch version than the other
peers.
"""

import multiprocessing
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer

LIMIT_SECONDS = 60


class DlroverFlash:
    """Rank 0 copies the state into shared memory, and a process that it starts writes the file.
    DLRover's own launcher would start that process before the ranks; both work in the same way.
    """

    def __init__(self, folder: str) -> None:
        # Forked while a process group's threads ran, the writing process did not answer (2 ranks).
        multiprocessing.set_start_method("spawn", force=True)
        self._checkpointer = DdpCheckpointer(folder)

    def save(self, path: str, model: torch.nn.Module) -> None:
        step = int(path.rpartition("-")[2])
        self._checkpointer.save_checkpoint(
            step, model.state_dict(), f"{path}/state", storage_type=StorageType.DISK
        )

    def guard(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def close(self) -> None:
        if dist.get_rank() == 0:
            self._checkpointer.wait_latest_checkpoint(timeout=LIMIT_SECONDS)

    def load(self, path: str, model: torch.nn.Module) -> None:
        """Load as `load_checkpoint` does when shared memory holds nothing."""
        found = self._checkpointer.storage.read_state_dict(f"{path}/state", read_func=_read)
        model.load_state_dict(found)

    def recall(self, model: torch.nn.Module) -> None:
        """Load from shared memory."""
        model.load_state_dict(self._checkpointer.load_checkpoint())


def _read(file: str) -> Any:
    return torch.load(file, map_location="cpu")

"""DLRover's flash checkpoint, in a file of its own: it runs on another torch than the other peers."""

import multiprocessing
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer

LIMIT_SECONDS = 60


class DlroverFlash:
    """Rank 0 copies into shared memory, a process that it starts writes. DLRover's own launcher would start that
    process before the ranks; both work in the same way.
    """

    def __init__(self, folder: str) -> None:
        # Forked beside the threads of a process group, the process that writes did not answer (2 ranks).
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
        """As `load_checkpoint` does where shared memory holds nothing."""
        found = self._checkpointer.storage.read_state_dict(f"{path}/state", read_func=_read)
        model.load_state_dict(found)

    def recall(self, model: torch.nn.Module) -> None:
        """From shared memory."""
        model.load_state_dict(self._checkpointer.load_checkpoint())


def _read(file: str) -> Any:
    return torch.load(file, map_location="cpu")

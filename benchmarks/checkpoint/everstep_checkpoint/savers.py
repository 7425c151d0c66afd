"""How each peer saves and loads according to its documentation: by default, and tuned for a CPU."""

import os
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import staging, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from everstep_checkpoint.saver import Saver


class TorchSave:
    """Only rank 0 saves; a rename makes the save atomic."""

    def save(self, path: str, model: torch.nn.Module) -> None:
        if dist.get_rank() == 0:
            os.makedirs(path)
            torch.save(model.state_dict(), f"{path}/state.part")
            os.replace(f"{path}/state.part", f"{path}/state")

    def guard(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def close(self) -> None:
        pass

    def load(self, path: str, model: torch.nn.Module) -> None:
        model.load_state_dict(torch.load(f"{path}/state", weights_only=True, mmap=True))


class DcpSync:
    def save(self, path: str, model: torch.nn.Module) -> None:
        state_dict_saver.save({"model": model.state_dict()}, checkpoint_id=path)

    def guard(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def close(self) -> None:
        pass

    def load(self, path: str, model: torch.nn.Module) -> None:
        state_dict_loader.load({"model": model.state_dict()}, checkpoint_id=path)


class DcpAsync(DcpSync):
    """`tuned`: with a stager that is reused and uses shared memory, and with cached plans."""

    def __init__(self, kind: state_dict_saver.AsyncCheckpointerType, *, tuned: bool) -> None:
        self._kind = kind
        self._stager = staging.DefaultStager(_STAGING) if tuned else None
        self._tuned = tuned
        self._written: Future[Any] | None = None
        self._group: Any = dist.new_group(backend="gloo")
        """DDP reduces in the default group meanwhile; if both used it, the ranks would wait for each other for ever."""

    def save(self, path: str, model: torch.nn.Module) -> None:
        if self._written is not None:
            self._written.result()
        more: dict[str, Any] = {}
        if self._tuned:
            more = {
                "async_stager": self._stager,
                "planner": DefaultSavePlanner(enable_plan_caching=True),
            }
        found = state_dict_saver.async_save(
            {"model": model.state_dict()},
            checkpoint_id=path,
            async_checkpointer_type=self._kind,
            process_group=self._group,
            **more,
        )
        if isinstance(found, Future):
            self._written = found
        else:
            found.staging_completion.result()
            self._written = found.upload_completion

    def close(self) -> None:
        if self._written is not None:
            self._written.result()


class TorchCheckpointing:
    """Copies in a thread, writes in a process; `lock` waits for the copy."""

    def __init__(self) -> None:
        import torch_checkpointing as library
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        save = library.AsyncCheckpointSaverConfig(
            staging_config=library.CheckpointStagerConfig(
                use_pinned_memory=False, use_non_blocking_copy=False
            )
        )
        # With direct I/O a write fails (EINVAL) on file systems that need another alignment.
        storage = LocalFileSystemStorageConfig(use_direct_io=False)
        self._manager = library.CheckpointManager.Config(save=save, storage_config=storage).build()
        self._written: Future[Any] | None = None

    def save(self, path: str, model: torch.nn.Module) -> None:
        if self._written is not None:
            self._written.result()
        self._written = self._manager.save(path, {"model": model.state_dict()})

    def guard(self) -> AbstractContextManager[Any]:
        guard: AbstractContextManager[Any] = self._manager.lock()
        return guard

    def close(self) -> None:
        if self._written is not None:
            self._written.result()

    def load(self, path: str, model: torch.nn.Module) -> None:
        self._manager.load(path, {"model": model.state_dict()})


_STAGING = staging.StagingOptions(
    use_pinned_memory=False,
    use_shared_memory=True,
    use_async_staging=False,
    use_non_blocking_copy=False,
)
_THREAD = state_dict_saver.AsyncCheckpointerType.THREAD
_PROCESS = state_dict_saver.AsyncCheckpointerType.PROCESS
SAVERS: dict[str, Callable[[], Saver]] = {
    "torch.save": TorchSave,
    "dcp.save": DcpSync,
    "dcp thread": lambda: DcpAsync(_THREAD, tuned=False),
    "dcp thread, tuned": lambda: DcpAsync(_THREAD, tuned=True),
    "dcp process": lambda: DcpAsync(_PROCESS, tuned=False),
    "dcp process, tuned": lambda: DcpAsync(_PROCESS, tuned=True),
    "torch-checkpointing": TorchCheckpointing,
}

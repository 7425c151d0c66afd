"""The training script under nvidia-resiliency-ext's in-process restart, with stock DDP. The
surviving processes stay, and their training function starts again from the newest checkpoint, with
fewer ranks.

Argument: milliseconds between the checks of its monitors; 0: the default (1 s).
"""

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from nvidia_resiliency_ext import inprocess
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from everstep_recovery import workload
from everstep_recovery.scripts import ddp_step

CHECKPOINT = Path(os.environ[workload.OUT], "checkpoint.pt")
INTERVALS = (
    "monitor_thread_interval",
    "monitor_process_interval",
    "heartbeat_interval",
    "progress_watchdog_interval",
    "last_call_wait",
)


class AbortGloo(inprocess.abort.Abort):  # type: ignore[misc]
    """Ends the gloo group. The library's own abort is for NCCL and needs a CUDA device."""

    def __call__(self, state: inprocess.state.FrozenState) -> inprocess.state.FrozenState:
        if dist.is_initialized():
            dist.destroy_process_group()
        return state


class OutsideStore(inprocess.store.TCPStore):  # type: ignore[misc]
    """A store that `supervise_nvrx.py` hosts, so rank 0 is a rank like any other."""

    @property
    def critical_ranks(self) -> tuple[int, ...]:
        return ()


def train(store: Store, call_wrapper: inprocess.CallWrapper | None = None) -> None:
    assert call_wrapper is not None
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    own = PrefixStore(str(call_wrapper.iteration), store)
    dist.init_process_group("gloo", store=own, rank=rank, world_size=world)
    ddp_step.train(CHECKPOINT, rank, world)


def main(interval_ms: int) -> None:
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["GROUP_PORT"]), is_master=False)
    given = {name: timedelta(milliseconds=interval_ms) for name in INTERVALS} if interval_ms else {}
    inprocess.Wrapper(store_factory=OutsideStore, abort=AbortGloo(), **given)(train)(store)


if __name__ == "__main__":
    main(int(sys.argv[1]))

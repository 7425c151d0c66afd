"""The training script under torchft: each process is a replica group of one rank.

`supervise_torchft.py` starts it.
"""

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torchft import DistributedDataParallel, Manager, ProcessGroupGloo

from everstep_recovery import workload
from everstep_recovery.scripts.ddp_step import accumulate

REPLICA, REPLICAS = int(os.environ["REPLICA"]), int(os.environ["REPLICAS"])
GROUP_TIMEOUT = timedelta(milliseconds=int(os.environ["COLLECTIVE_MS"]))


class RepairedDdp(DistributedDataParallel):  # type: ignore[misc]
    """torchft 0.2.0 asserts in this hook that a failed reduction has left a future. On torch 2.15 it has
    not, so survivors die of the assertion; the manager knows of the failure, and skips the step.
    """

    @staticmethod
    def _comm_hook(
        state: Manager,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[torch.Tensor]:
        work = state.allreduce(bucket.buffer())
        work.wait()
        managed = work.get_future()
        found: torch.futures.Future[torch.Tensor] | None = getattr(managed, "_fut", managed)
        if found is None:
            found = torch.futures.Future()
            found.set_result(bucket.buffer())
        return found


def main() -> None:
    torch.set_num_threads(1)
    model = workload.build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=workload.LEARNING_RATE)

    def load(held: dict[str, Any]) -> None:
        model.load_state_dict(held["model"])
        optimizer.load_state_dict(held["optimizer"])

    def save() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    manager = Manager(
        pg=ProcessGroupGloo(timeout=GROUP_TIMEOUT),
        load_state_dict=load,
        state_dict=save,
        min_replica_size=1,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        hostname="127.0.0.1",
        lighthouse_addr=os.environ["TORCHFT_LIGHTHOUSE"],
        replica_id=f"replica_{REPLICA}_",
        heartbeat_interval=timedelta(milliseconds=int(os.environ["HEARTBEAT_MS"])),
        init_sync=False,
    )
    train(manager, model, optimizer)


def train(manager: Manager, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    wrapped = RepairedDdp(manager, model)
    data, log = workload.Numbers(), workload.StepLog()
    while manager.current_step() < workload.steps():
        manager.start_quorum()
        optimizer.zero_grad()
        # The position in the shard follows from the step: a replica that comes back repeats nothing.
        # The quorum says at which step it joins.
        manager.wait_quorum()
        step = manager.current_step() + 1
        used = accumulate(wrapped, data, log, step, REPLICA, REPLICAS)
        rank, world, part = (
            manager.participating_rank(), manager.num_participants(), manager.is_participating()
        )  # fmt: skip
        if manager.should_commit():
            optimizer.step()
            if part and rank is not None:
                log.step(step, rank, world, used)


main()

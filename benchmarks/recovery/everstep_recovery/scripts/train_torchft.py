"""The training script under torchft: each process is a replica group of one rank.

`supervise_torchft.py` starts it.
"""

from typing import Any

import torch
import torch.distributed as dist
from torchft import DistributedDataParallel, Manager, ProcessGroupGloo

from everstep_recovery import workload
from everstep_recovery.scripts import torchft_step


class RepairedDdp(DistributedDataParallel):  # type: ignore[misc]
    """Repairs a hook in which torchft 0.2.0 asserts that a failed reduction has left a future. On
    torch 2.15 there is none, so survivors die of the assertion. Here they continue: the manager
    knows of the failure and skips the step.
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
    manager = torchft_step.build_manager(
        ProcessGroupGloo(timeout=torchft_step.GROUP_TIMEOUT),
        load,
        save,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
    )
    torchft_step.train(manager, RepairedDdp(manager, model), optimizer)


main()

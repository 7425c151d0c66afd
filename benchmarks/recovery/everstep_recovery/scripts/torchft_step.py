"""Training under torchft, whatever wraps the model. `supervise_torchft.py` sets the environment."""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torchft import Manager

from everstep_recovery import workload
from everstep_recovery.scripts.ddp_step import Wrapped, accumulate

REPLICA, REPLICAS = int(os.environ["REPLICA"]), int(os.environ["REPLICAS"])
GROUP_TIMEOUT = timedelta(milliseconds=int(os.environ["COLLECTIVE_MS"]))
State = dict[str, Any]


def build_manager(
    group: Any, load: Callable[[State], None], save: Callable[[], State], **more: Any
) -> Manager:
    """`more`: where the replica group's ranks meet, if the environment does not define it."""
    return Manager(
        pg=group,
        load_state_dict=load,
        state_dict=save,
        min_replica_size=1,
        hostname="127.0.0.1",
        lighthouse_addr=os.environ["TORCHFT_LIGHTHOUSE"],
        replica_id=f"replica_{REPLICA}_",
        heartbeat_interval=timedelta(milliseconds=int(os.environ["HEARTBEAT_MS"])),
        init_sync=False,
        **more,
    )


def train(
    manager: Manager,
    wrapped: Wrapped,
    optimizer: torch.optim.Optimizer,
    place: int = 0,
    over: int = 1,
) -> None:
    """Take all steps. `place`: this rank's number among the `over` ranks of its replica group."""
    data, log = workload.Numbers(), workload.StepLog()
    while manager.current_step() < workload.steps():
        manager.start_quorum()
        optimizer.zero_grad()
        # The position in the data follows from the step, so a returning replica repeats nothing.
        # The quorum decides at which step it joins.
        manager.wait_quorum()
        step = manager.current_step() + 1
        used = accumulate(wrapped, data, log, step, REPLICA * over + place, REPLICAS * over)
        group, groups, part = (
            manager.participating_rank(), manager.num_participants(), manager.is_participating()
        )  # fmt: skip
        if manager.should_commit():
            optimizer.step()
            if part and group is not None:
                log.step(step, group * over + place, groups * over, used)

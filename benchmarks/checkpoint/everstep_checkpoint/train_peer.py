"""The same loop, plain or under DistributedDataParallel, with a peer that saves."""

import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from everstep_checkpoint import workload
from everstep_checkpoint.environments import DLROVER
from everstep_checkpoint.saver import MemorySaver, Saver


def main(system: str) -> None:
    plan = workload.read_plan()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = workload.build_model(plan.mib)
    trained = DistributedDataParallel(model) if world > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    saver = _open_saver(system, plan.folder)
    clock = workload.Clock(plan.folder, rank)
    rows = torch.randn(4096, workload.WIDTH)
    for number in range(1, plan.steps + 1):
        inputs = rows[torch.randint(0, len(rows), (plan.batch,))]
        clock.begin(number)
        optimizer.zero_grad()
        workload.compute_loss(trained, inputs).backward()  # type: ignore[no-untyped-call]
        clock.computed()
        with saver.guard():
            clock.applying()
            optimizer.step()
        clock.applied()
        if number % plan.every == 0:
            saver.save(f"{plan.folder}/step-{number}", model)
    saver.close()
    clock.write()
    newest = f"{plan.folder}/step-{plan.steps // plan.every * plan.every}"
    if rank == 0 and world == 1:
        spent = {"store": _measure(lambda: saver.load(newest, model))}
        if isinstance(saver, MemorySaver):
            spent["memory"] = _measure(partial(saver.recall, model))
        workload.write_loads(0, spent)
    dist.barrier()
    # A process that a peer keeps for its writes must neither keep this one alive nor outlive it.
    for process in multiprocessing.active_children():
        process.kill()
    sys.stdout.flush()
    os._exit(0)


def _open_saver(system: str, folder: str) -> Saver:
    if system == DLROVER:  # its environment does not have the other peers
        from everstep_checkpoint.dlrover_saver import DlroverFlash

        return DlroverFlash(folder)
    from everstep_checkpoint.savers import SAVERS

    return SAVERS[system]()


def _measure(load: Callable[[], object]) -> list[float]:
    spent = []
    for _ in range(3):
        started = time.monotonic()
        load()
        spent.append(time.monotonic() - started)
    return spent


if __name__ == "__main__":
    main(sys.argv[1])

"""Load the newest checkpoint of a run as an agent and a worker do together, and write how long it
took. In each try every rank loads it first from the store, then from the memory of the same agent,
as after the death of a worker. Then it measures a memcpy of as many bytes, at once and tensor by
tensor. All ranks do each of these at the same time.
"""

import asyncio
import multiprocessing
import sys
import tempfile
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path

import torch

from everstep.checkpoint_reader import Checkpoint
from everstep.tracked import Tracked
from everstep_agent.checkpoint.memory_tier import MemoryTier
from everstep_agent.checkpoint.restore import Fetched, Fetcher
from everstep_agent.runlog.run_log import RunLog
from everstep_agent.storage import open_store
from everstep_checkpoint import workload

TRIES = 3
LIMIT_SECONDS = 300.0
"""Limit for the other ranks to reach the same point."""


def main(uri: str, ranks: int) -> int:
    spawn = multiprocessing.get_context("spawn")
    together = spawn.Barrier(ranks, timeout=LIMIT_SECONDS)
    started = [spawn.Process(target=load, args=(uri, rank, together)) for rank in range(ranks)]
    for process in started:
        process.start()
    for process in started:
        process.join()
    return int(any(process.exitcode for process in started))


def load(uri: str, rank: int, together: Barrier) -> None:
    """What one rank and its agent do."""
    plan = workload.read_plan()
    spent: dict[str, list[float]] = {"store": [], "memory": [], "memcpy": [], "tensors": []}
    for _ in range(TRIES):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, asyncio.Runner() as loop:
            agent = Agent(uri, Path(folder))
            for source in ("store", "memory"):
                spent[source].append(_restore(agent, loop, plan.mib, together))
        together.wait()
        spent["memcpy"].append(workload.measure_memcpy(plan.mib * 2**20))
        together.wait()
        spent["tensors"].append(workload.measure_tensor_memcpy(plan.mib))
    workload.write_loads(rank, spent)


class Agent:
    """An agent's store, run log and memory, which outlive its worker."""

    def __init__(self, uri: str, folder: Path) -> None:
        self._folder = folder
        self._store = open_store(uri, "", {})
        self._log, self._memory = RunLog(self._store), MemoryTier(folder)

    async def fetch(self) -> Fetched:
        await self._log.refresh()
        newest = self._log.index.newest_resumable
        assert newest is not None
        return await Fetcher(self._store, self._memory).fetch(newest, self._folder)


def _restore(agent: Agent, loop: asyncio.Runner, mib: int, together: Barrier) -> float:
    """Restore the model. Returns the seconds, without the time to build the model and to free what
    this call used.
    """
    together.wait()
    started = time.monotonic()
    fetched = loop.run(agent.fetch())
    reader = Checkpoint(str(fetched.manifest_path), str(fetched.places_path))
    opened = time.monotonic()
    model = workload.build_model(mib)  # as in a script, before `job.track`
    together.wait()
    built = time.monotonic()
    _load(model, reader)
    return time.monotonic() - built + opened - started


def _load(model: torch.nn.Module, reader: Checkpoint) -> None:
    tracked = Tracked()
    tracked.add("model", model)
    trees = (reader.manifest.state or {})["objects"]
    tracked.load(["model"], trees, reader.read, torch.device("cpu"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))

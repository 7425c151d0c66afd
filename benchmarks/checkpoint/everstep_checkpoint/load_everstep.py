"""Loads the newest checkpoint of a run as an agent and a worker do together, and writes how long that took: once from
the store, then from the memory of the same agent, as after the death of a worker.
"""

import asyncio
import json
import sys
import tempfile
import time
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


def main(uri: str) -> None:
    plan = workload.read_plan()
    spent: dict[str, list[float]] = {"store": [], "memory": []}
    for _ in range(TRIES):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            memory = MemoryTier(Path(folder))
            for source in spent:
                spent[source].append(_restore(uri, memory, Path(folder), plan.mib))
    (Path(plan.folder) / "load.json").write_text(json.dumps(spent))


def _restore(uri: str, memory: MemoryTier, folder: Path, mib: int) -> float:
    """Seconds; without those to build the model, and to free what this call used."""
    started = time.monotonic()
    fetched = asyncio.run(_fetch(uri, memory, folder))
    reader = Checkpoint(str(fetched.manifest_path), str(fetched.places_path))
    opened = time.monotonic()
    model = workload.build_model(mib)  # as in a script, before `job.track`
    built = time.monotonic()
    _load(model, reader)
    return time.monotonic() - built + opened - started


def _load(model: torch.nn.Module, reader: Checkpoint) -> None:
    tracked = Tracked()
    tracked.add("model", model)
    trees = (reader.manifest.state or {})["objects"]
    tracked.load(["model"], trees, reader.read, torch.device("cpu"))


async def _fetch(uri: str, memory: MemoryTier, folder: Path) -> Fetched:
    store = open_store(uri, "", {})
    log = RunLog(store)
    await log.refresh()
    newest = log.index.newest_resumable
    assert newest is not None
    return await Fetcher(store, memory).fetch(newest, folder)


if __name__ == "__main__":
    main(sys.argv[1])

"""Loads the newest checkpoint of a run as an agent and a worker do together, and writes how long that took."""

import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path

from everstep.checkpoint_reader import Checkpoint
from everstep_agent.checkpoint.restore import Fetched, fetch_checkpoint
from everstep_agent.runlog.run_log import RunLog
from everstep_agent.storage import open_store
from everstep_checkpoint import workload

TRIES = 3


def main(uri: str) -> None:
    plan = workload.read_plan()
    model = workload.build_model(plan.mib)
    spent = []
    for _ in range(TRIES):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            started = time.monotonic()
            fetched = asyncio.run(_fetch(uri, Path(folder)))
            reader = Checkpoint(str(fetched.manifest_path), str(fetched.chunks))
            names = model.state_dict()
            model.load_state_dict({name: reader.tensor(f"model/{name}") for name in names})
            spent.append(time.monotonic() - started)
    (Path(plan.folder) / "load.json").write_text(json.dumps(spent))


async def _fetch(uri: str, folder: Path) -> Fetched:
    store = open_store(uri, "", {})
    log = RunLog(store)
    await log.refresh()
    newest = log.index.newest_resumable
    assert newest is not None
    return await fetch_checkpoint(store, newest, folder)


if __name__ == "__main__":
    main(sys.argv[1])

"""Starts one process per rank for nvidia-resiliency-ext's in-process restart, and hosts the stores,
so that they do not depend on a rank. A process that ends is not started again, because the wrapper
accepts no new process.

Arguments: the number of ranks; the interval for `train_nvrx.py` in milliseconds.
"""

import os
import subprocess
import sys
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]

SCRIPT = Path(__file__).with_name("train_nvrx.py")


def main(ranks: int, interval_ms: int) -> None:
    stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(2)]
    shared = {
        **os.environ,
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(stores[0].port),
        "GROUP_PORT": str(stores[1].port),
    }
    running = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(interval_ms)], env={**shared, "RANK": str(rank)}
        )
        for rank in range(ranks)
    ]
    for process in running:
        process.wait()


main(*map(int, sys.argv[1:]))

"""Runs torchft's lighthouse and one training process per replica.

It starts a training process again when it ends, as a cluster would.

Arguments: the number of replicas; milliseconds without a heartbeat until a replica is given up;
milliseconds between heartbeats; the limit of a collective in milliseconds.
"""

import os
import subprocess
import sys
from pathlib import Path

from torchft.coordination import LighthouseServer

SCRIPT = Path(__file__).with_name("train_torchft.py")


def main(replicas: int, expiry_ms: int, heartbeat_ms: int, collective_ms: int) -> None:
    lighthouse = LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=1,
        join_timeout_ms=min(1000, 2 * expiry_ms),
        quorum_tick_ms=min(100, expiry_ms // 3),
        heartbeat_timeout_ms=expiry_ms,
    )
    shared = {
        **os.environ,
        "TORCHFT_LIGHTHOUSE": lighthouse.address(),
        "REPLICAS": str(replicas),
        "HEARTBEAT_MS": str(heartbeat_ms),
        "COLLECTIVE_MS": str(collective_ms),
    }

    def start(replica: int) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            [sys.executable, str(SCRIPT)], env={**shared, "REPLICA": str(replica)}
        )

    running = {
        process.pid: (number, process) for number in range(replicas) for process in [start(number)]
    }
    while running:
        pid, _ = os.wait()
        number, process = running.pop(pid)
        process.returncode = 0
        fresh = start(number)
        running[fresh.pid] = (number, fresh)


main(*map(int, sys.argv[1:]))

"""Runs torchft's lighthouse and the training processes of each replica group.

When one process of a group ends, the supervisor kills the others of that group and starts all of
them again, as torchelastic would.

Arguments: the number of replica groups; milliseconds without a heartbeat until a replica is given
up; milliseconds between heartbeats; the time limit of a collective in milliseconds; the number of
ranks per group.
"""

import os
import socket
import subprocess
import sys
from pathlib import Path

from torchft.coordination import LighthouseServer

SCRIPTS = Path(__file__).parent
Group = list["subprocess.Popen[bytes]"]


def main(replicas: int, expiry_ms: int, heartbeat_ms: int, collective_ms: int, shard: int) -> None:
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
    script = SCRIPTS / ("train_torchft.py" if shard == 1 else "train_torchft_hsdp.py")
    groups = {replica: start(script, replica, shard, shared) for replica in range(replicas)}
    while True:
        pid, _ = os.wait()
        for replica, group in groups.items():
            if any(process.pid == pid for process in group):
                end(group, pid)
                groups[replica] = start(script, replica, shard, shared)


def start(script: Path, replica: int, shard: int, shared: dict[str, str]) -> Group:
    """Start one process per rank. The ranks of a group meet at a store that the group's first rank
    opens.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    own = {"REPLICA": str(replica), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    own["WORLD_SIZE"] = str(shard)
    return [
        subprocess.Popen([sys.executable, str(script)], env={**shared, **own, "RANK": str(rank)})
        for rank in range(shard)
    ]


def end(group: Group, ended: int) -> None:
    for process in group:
        if process.pid == ended:
            process.returncode = 0
        else:
            process.kill()
            process.wait()


main(*map(int, sys.argv[1:]))

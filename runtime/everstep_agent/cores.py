"""How many cores this process may use."""

import os
from pathlib import Path

from everstep_agent.cgroups import MOUNTS, OWN, find_files

_V1 = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
_V2 = ("cpu.max",)


def share_cores(workers: int, mounts: Path = MOUNTS, own: Path = OWN) -> int:
    """How many of them each of so many workers gets; at least one.

    The kernel's affinity mask has all cores of the node, whatever the container's CPU limit is. More
    threads than the limit allows would all stand still for the rest of each period once it is used up.
    """
    cores = float(len(os.sched_getaffinity(0)))
    limit = _read_limit(mounts, own)
    return max(1, int(min(cores, limit or cores) / max(1, workers)))


def _read_limit(mounts: Path, own: Path) -> float:
    """The container's CPU limit, in cores; 0: there is none, or it is not known."""
    try:
        texts = [file.read_text() for file in find_files("cpu", _V1, _V2, mounts, own)]
    except OSError:
        return 0.0
    found = " ".join(texts).split()
    if len(found) != 2 or not all(one.isdigit() for one in found):  # "max", or -1
        return 0.0
    quota, period = map(int, found)
    return quota / period if period else 0.0

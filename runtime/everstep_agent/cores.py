"""How many cores this process may use."""

import os
from pathlib import Path

from everstep_agent.cgroups import MOUNTS, OWN, find_files

_V1 = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
_V2 = ("cpu.max",)


def share_cores(workers: int, mounts: Path = MOUNTS, own: Path = OWN) -> int:
    """How many cores each of `workers` processes gets if they share those that may be used; at least one.

    The affinity mask of a container has all cores of the node, whatever its CPU limit is. If more
    threads run than the limit allows, the kernel stops them all for the rest of each period.
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

"""The environment of the workers, and thus of the user's code."""

from collections.abc import Mapping

from everstep_agent.cores import share_cores
from everstep_contract import env

TUNABLES = "GLIBC_TUNABLES"
STREAM_FROM = "glibc.cpu.x86_non_temporal_threshold"
"""The size from which glibc's memcpy writes past the caches (non-temporal stores), in bytes. Other C
libraries and other processors ignore this setting.
"""
STREAM_BYTES = 1 << 20
"""By default glibc chooses a part of the last-level cache. The tensors of a model are often smaller, and
copying them through the caches takes up to 1.5 times as long.
"""


def build(environ: Mapping[str, str], workers: int) -> dict[str, str]:
    """Everything but the job's token. Unless the user has set them: a share of the container's cores
    for each of the pod's workers, and faster copies.
    """
    found = {"OMP_NUM_THREADS": str(share_cores(workers))} | {
        k: v for k, v in environ.items() if k != env.PREFIX + "TOKEN"
    }
    tunables = found.get(TUNABLES, "")
    if STREAM_FROM not in tunables:
        ours = f"{STREAM_FROM}={STREAM_BYTES}"
        found[TUNABLES] = f"{tunables}:{ours}" if tunables else ours
    return found

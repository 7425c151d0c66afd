"""`timeline JOB [INCIDENT]`."""

import argparse
import time
from typing import TYPE_CHECKING

from everstep_kubectl.cluster import JOBS, QUARANTINES, Cluster, ClusterError, Object, Reading
from everstep_kubectl.commands.showing import show

if TYPE_CHECKING:
    from collections.abc import Sequence

    from everstep_kubectl.incidents import Incident


def run(arguments: argparse.Namespace, cluster: Cluster) -> int:
    job_reading = cluster.get(JOBS, arguments.job)
    quarantines = cluster.begin("get", QUARANTINES, "-o", "json")
    from everstep_kubectl import incidents, jobs, timeline

    job = job_reading.object()
    built = incidents.build_incidents(job, optional(quarantines))
    try:
        found = incidents.choose(built, arguments.incident)
    except LookupError as error:
        raise ClusterError(f"{arguments.job}: {error.args[0]}") from None
    if arguments.output == "png":
        return _draw(arguments, found)
    now = time.time()  # noqa: TID251 ages are shown as of now
    whole = jobs.is_whole(job)
    show(arguments, found, lambda: timeline.render(arguments.job, found, whole=whole, now=now))
    return 0


def optional(reading: Reading) -> list[Object]:
    """The quarantines, if the user may read them. They are cluster-scoped, so the right to read the
    job does not include them.
    """
    try:
        return reading.items()
    except ClusterError:
        return []


def _draw(arguments: argparse.Namespace, found: "Sequence[Incident]") -> int:
    if not found:
        raise ClusterError(f"{arguments.job}: no interruption so far, there is nothing to draw")
    from everstep_kubectl import picture

    path = arguments.file or f"{arguments.job}-timeline.png"
    picture.save(arguments.job, found, path)
    print(path)
    return 0

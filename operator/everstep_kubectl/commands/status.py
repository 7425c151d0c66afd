"""`status [JOB]`."""

import argparse
import time

from everstep_kubectl.cluster import JOBS, Cluster
from everstep_kubectl.commands.showing import show


def run(arguments: argparse.Namespace, cluster: Cluster) -> int:
    wanted = [JOBS, *([arguments.job] if arguments.job else [])]
    reading = cluster.get(*wanted, everywhere=arguments.all_namespaces)
    from everstep_kubectl import jobs

    now = time.time()  # noqa: TID251 ages are shown as of now
    found = [jobs.build_job(raw, now) for raw in reading.items()]
    if arguments.job:
        show(arguments, found[0], lambda: jobs.render_job(found[0], now))
    else:
        everywhere = arguments.all_namespaces
        show(arguments, found, lambda: jobs.render_table(found, now, everywhere=everywhere))
    return 0

"""`status [JOB]`."""

import argparse
import time

from everstep_kubectl.cluster import JOBS, Cluster


def run(arguments: argparse.Namespace, cluster: Cluster) -> int:
    wanted = [JOBS, *([arguments.job] if arguments.job else [])]
    reading = cluster.get(*wanted, everywhere=arguments.all_namespaces)
    from everstep_kubectl import documents, jobs

    now = time.time()  # noqa: TID251 ages are shown as of now
    found = [jobs.build_job(raw, now) for raw in reading.items()]
    if arguments.output != "table":
        print(documents.write(found[0] if arguments.job else found, arguments.output))
    elif arguments.job:
        print(jobs.render_job(found[0], now))
    elif found:
        print(jobs.render_table(found, now, everywhere=arguments.all_namespaces))
    else:
        where = "in any namespace" if arguments.all_namespaces else "here (-A: everywhere)"
        print(f"there is no ResilientTrainingJob {where}")
    return 0

"""`drill JOB`: deletes one pod by its UID, watches the recovery, and reports how it went."""

import argparse
import json
import time
from typing import TYPE_CHECKING

from everstep_kubectl.cluster import JOBS, Cluster, ClusterError, Object
from everstep_kubectl.commands.switch import watch_job

if TYPE_CHECKING:
    from everstep_kubectl.drill import Target


def run(arguments: argparse.Namespace, cluster: Cluster) -> int:
    """Return 1 if steps were lost, or if the job had not recovered when the time was over. If no
    drill was possible, the exit status is 2.
    """
    from everstep_kubectl import drill

    job = cluster.get(JOBS, arguments.job).object()
    target = drill.plan_drill(job, arguments.slot)
    if isinstance(target, drill.Refused):
        raise ClusterError(f"no drill: {target.message}")
    path = f"/api/v1/namespaces/{job['metadata']['namespace']}/pods/{target.pod}"
    options = json.dumps(drill.build_delete(target, sudden=arguments.sudden))
    cluster.begin("delete", "--raw", path, "-f", "-", stdin=options).text()
    grace = "one second to live" if arguments.sudden else "its grace period to save"
    print(f"drill: deleted pod {target.pod} on {target.node}, with {grace}", flush=True)
    return _watch(arguments, cluster, job, target)


def _watch(
    arguments: argparse.Namespace, cluster: Cluster, before: Object, target: "Target"
) -> int:
    from everstep_kubectl import drill, incidents, jobs

    known = frozenset(i.id for i in incidents.build_incidents(before))
    shown = ""
    for job in watch_job(cluster, before, arguments.timeout):
        if over := jobs.find_end(job):
            print(f"{arguments.job} is {over}, so the drill has proved nothing")
            return 1
        found = drill.find_incident(incidents.build_incidents(job), known, target.slot)
        if found is not None and drill.is_recovered(job, target, found):
            now = time.time()  # noqa: TID251 ages are shown as of now
            print(f"\n{drill.render_result(job, found, sudden=arguments.sudden, now=now)}")
            return 1 if found.cost.steps_lost else 0
        shown = _tell(job, shown)
    print(
        f"{arguments.job} had not recovered after {arguments.timeout:.0f} s: "
        f"kubectl everstep status -n {before['metadata']['namespace']} {arguments.job}"
    )
    return 1


def _tell(job: Object, shown: str) -> str:
    from everstep_kubectl import jobs

    line = jobs.describe_state(job)
    if line != shown:
        print(f"  {line}", flush=True)
    return line

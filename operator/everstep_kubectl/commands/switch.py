"""`suspend JOB`, `resume JOB`: set one field of the spec, and wait until it is in effect."""

import argparse
import json
from collections.abc import Iterator
from urllib.parse import quote

from everstep_kubectl.cluster import API, JOBS, Cluster, ClusterError, Object


def suspend(arguments: argparse.Namespace, cluster: Cluster) -> int:
    return _switch(arguments, cluster, on=True)


def resume(arguments: argparse.Namespace, cluster: Cluster) -> int:
    return _switch(arguments, cluster, on=False)


def _switch(arguments: argparse.Namespace, cluster: Cluster, *, on: bool) -> int:
    """Return 1 if the job is over, or if it had not reached the state when the time was over. In
    the second case the request stays in the spec.
    """
    from everstep_kubectl import jobs, readerpod

    before = cluster.get(JOBS, arguments.job).object()
    if over := jobs.find_end(before):
        print(f"{arguments.job} is {over}: there is nothing to {'suspend' if on else 'resume'}")
        return 1
    if readerpod.QUEUE in (before["metadata"].get("labels") or {}):
        print(f"note: {arguments.job} is queued by Kueue, which may set spec.suspend again")
    patch = json.dumps({"spec": {"suspend": on}})
    call = ("patch", JOBS, arguments.job, "--type=merge", "-p", patch)
    cluster.begin(*call, *cluster.scope()).text()
    if arguments.no_wait:
        print(f"{arguments.job}: asked to {'save and stop' if on else 'resume'}")
        return 0
    return _await(arguments, cluster, before, "Suspended" if on else "Running")


def _await(arguments: argparse.Namespace, cluster: Cluster, before: Object, wanted: str) -> int:
    from everstep_kubectl import jobs, text

    shown = ""
    for job in watch_job(cluster, before, arguments.timeout):
        status = job.get("status") or {}
        heard = status.get("observedGeneration") == job["metadata"].get("generation")
        if heard and jobs.is_true(job, wanted):
            print(f"{arguments.job}: {wanted} {_describe_place(status)}")
            return 0
        if heard and (end := jobs.find_end(job)) and (found := jobs.condition(job, end)):
            print(f"{arguments.job}: {end}: {found['reason']}: {found['message']}")
            return 1
        line = f"{arguments.job}: {jobs.describe_state(job)}"
        if line != shown:
            print(line, flush=True)
            shown = line
    print(
        f"{arguments.job}: not {wanted} after {text.took(arguments.timeout)}; the request stays in the spec. "
        "To see why it takes so long: "
        f"kubectl everstep status -n {before['metadata']['namespace']} {arguments.job}"
    )
    return 1


def _describe_place(status: Object) -> str:
    """How far a job is, which may not have begun."""
    step, saved = status.get("step"), (status.get("checkpoint") or {}).get("step")
    where = f"at step {step}" if step else "before its first step"
    return f"{where}, checkpoint of step {saved}" if saved else f"{where}, without a checkpoint"


def watch_job(cluster: Cluster, job: Object, seconds: float) -> Iterator[Object]:
    """`job`: as it was read; its namespace is the one that kubectl has chosen."""
    name, namespace = job["metadata"]["name"], job["metadata"]["namespace"]
    field = quote(f"metadata.name={name}")
    path = f"{API}/namespaces/{namespace}/resilienttrainingjobs?fieldSelector={field}"
    for kind, job in cluster.watch(path, seconds):
        if kind == "DELETED":
            raise ClusterError(f"{name} was deleted")
        yield job

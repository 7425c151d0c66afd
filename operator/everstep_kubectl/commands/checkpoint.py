"""`checkpoint JOB --pin NAME`: sets one field of the spec, and waits until the checkpoint is in the
run.
"""

import argparse
import json
from typing import TYPE_CHECKING

from everstep_kubectl.cluster import JOBS, Cluster, ClusterError, Object
from everstep_kubectl.commands.switch import watch_job

if TYPE_CHECKING:
    from everstep_kubectl.pins import Answer


def run(arguments: argparse.Namespace, cluster: Cluster) -> int:
    """Return 1 if the checkpoint did not exist when the time was over, or if it cannot be made."""
    from everstep_contract.names import find_pin_problem
    from everstep_kubectl import pins

    if problem := find_pin_problem(arguments.pin):
        raise ClusterError(f"--pin: {problem}")
    job = cluster.get(JOBS, arguments.job).object()
    answer = pins.decide_pinned(job, arguments.pin)
    if answer is None and not arguments.no_wait:
        answer = pins.decide_suspended(job)
    if answer is not None and answer.ok:
        return _confirm(arguments, cluster, job, answer)
    if answer is not None:
        print(answer.message)
        return 1
    patch = json.dumps({"spec": {"checkpoint": {"pin": arguments.pin}}})
    call = ("patch", JOBS, arguments.job, "--type=merge", "-p", patch)
    cluster.begin(*call, *cluster.scope()).text()
    if arguments.no_wait:
        print(f"{arguments.job}: asked to save a checkpoint and to pin it as {arguments.pin}")
        return 0
    return _await(arguments, cluster, job)


def _confirm(arguments: argparse.Namespace, cluster: Cluster, job: Object, told: "Answer") -> int:
    """Read in the store whether this pin, which the job reports, still is one: the job learns some seconds later
    that somebody removed it, and a suspended one not at all.
    """
    from everstep_kubectl import pins
    from everstep_kubectl.commands import checkpoints

    try:
        kept = checkpoints.list_pins(arguments, cluster, job)
    except ClusterError as error:
        print(
            f"{told.message} already, as the job last reported; nothing new was saved. The run could not be read to "
            f"see whether the pin was removed since: {error}"
        )
        return 0
    answer = told if arguments.pin in kept else pins.tell_unpinned(job, arguments.pin)
    print(f"{answer.message}{' already; nothing new was saved' if answer.ok else ''}")
    return 0 if answer.ok else 1


def _await(arguments: argparse.Namespace, cluster: Cluster, before: Object) -> int:
    from everstep_kubectl import jobs, pins, text

    shown = ""
    for job in watch_job(cluster, before, arguments.timeout):
        if (answer := pins.decide_pinned(job, arguments.pin)) is not None:
            if answer.ok and pins.is_older(job, before):
                return _confirm(arguments, cluster, job, answer)
            print(answer.message)
            return 0 if answer.ok else 1
        if (answer := pins.decide_suspended(job)) is not None:
            print(f"{answer.message}. The request stays in the spec")
            return 1
        line = f"{arguments.job}: {jobs.describe_state(job)}"
        if line != shown:
            print(line, flush=True)
            shown = line
    print(
        f"{arguments.job}: no checkpoint is pinned as {arguments.pin} after"
        f" {text.took(arguments.timeout)}; the request stays in the spec. To see why it takes so long: "
        f"kubectl everstep status -n {before['metadata']['namespace']} {arguments.job}"
    )
    return 1

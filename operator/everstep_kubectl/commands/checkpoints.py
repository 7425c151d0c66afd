"""`checkpoints ls|verify|restore|unpin JOB`: reads the run in the cluster, where the keys are."""

import argparse
import contextlib
import json
import secrets
import sys
import threading
from typing import Any
from urllib.parse import quote

from everstep_kubectl.cluster import JOBS, Cluster, ClusterError, Object
from everstep_kubectl.commands.showing import show


def usage(arguments: argparse.Namespace, cluster: Cluster) -> int:
    arguments.parser.print_help()
    return 2


def ls(arguments: argparse.Namespace, cluster: Cluster) -> int:
    from everstep_kubectl import checkpoints, readerpod

    job = cluster.get(JOBS, arguments.job).object()
    _, catalog = _read(arguments, cluster, job, ["checkpoints", readerpod.run_of(job), "--json"])
    show(arguments, catalog, lambda: checkpoints.render_catalog(catalog))
    return 0


def verify(arguments: argparse.Namespace, cluster: Cluster) -> int:
    """Return 1 if the run has a gap."""
    from everstep_kubectl import checkpoints, readerpod

    job = cluster.get(JOBS, arguments.job).object()
    status, found = _read(arguments, cluster, job, ["verify", readerpod.run_of(job), "--json"])
    show(arguments, found, lambda: checkpoints.render_verified(found))
    return status


def restore(arguments: argparse.Namespace, cluster: Cluster) -> int:
    """Print the new job's manifest to standard output, and everything else to standard error."""
    from everstep_kubectl import documents, readerpod

    job = cluster.get(JOBS, arguments.job).object()
    run = arguments.run or f"{readerpod.name_of_run(job)}-from-{arguments.step}"
    if problem := readerpod.find_restore_problem(job, new=arguments.new, run=run):
        raise ClusterError(problem)
    uri = job["spec"]["checkpoint"]["uri"].rstrip("/")
    command = ["fork", readerpod.run_of(job), "--step", str(arguments.step)]
    _, forked = _read(arguments, cluster, job, [*command, "--to", f"{uri}/{run}", "--json"])
    _tell(
        f"copied the checkpoint of step {forked['step']} to {forked['run']}; {arguments.job} and its run "
        f"are as they were. To go on from there, apply the manifest below"
    )
    print(documents.write(readerpod.build_restored(job, new=arguments.new, run=run), "yaml"))
    return 0


def unpin(arguments: argparse.Namespace, cluster: Cluster) -> int:
    from everstep_kubectl import readerpod

    job = cluster.get(JOBS, arguments.job).object()
    command = ["checkpoints", readerpod.run_of(job), "--unpin", arguments.name, "--json"]
    _, found = _read(arguments, cluster, job, command)
    what = "was unpinned before" if found["before"] else "is unpinned"
    print(f"{arguments.job}: {found['name']} (step {found['step']}) {what}")
    return 0


def list_pins(arguments: argparse.Namespace, cluster: Cluster, job: Object) -> set[str]:
    """The names of the checkpoints that the run keeps. Raises ClusterError."""
    from everstep_kubectl import readerpod

    _tell(f"reading the run of {arguments.job}: which checkpoints are pinned?")
    _, catalog = _read(arguments, cluster, job, ["checkpoints", readerpod.run_of(job), "--json"])
    return {pin["name"] for pin in catalog.get("pins") or ()}


def _read(
    arguments: argparse.Namespace, cluster: Cluster, job: Object, command: list[str]
) -> tuple[int, Any]:
    """Exit status (0 or 1) and what the pod printed. Raises ClusterError with the pod's last
    message.
    """
    from everstep_kubectl import readerpod

    try:
        pod = readerpod.build_pod(
            job, command, seconds=arguments.timeout, suffix=secrets.token_hex(3)
        )
    except LookupError as error:
        raise ClusterError(f"{arguments.job}: {error.args[0]}") from None
    name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
    cluster.begin("create", "-f", "-", stdin=json.dumps(pod)).text()
    try:
        status, words = _await(arguments, cluster, namespace, name)
        log = cluster.begin("logs", name, "-n", namespace).text()
        return status, parse_log(name, status, words, log)
    finally:
        with contextlib.suppress(ClusterError):
            cluster.begin("delete", "pod", name, "-n", namespace, "--wait=false").text()


def parse_log(name: str, status: int, words: str, log: str) -> Any:
    """The answer, which is the last line. Raises ClusterError with the pod's message if there is
    none.
    """
    last = (log.strip().splitlines() or [""])[-1]
    if status in (0, 1) and last.startswith("{"):
        return json.loads(last)
    said = last.removeprefix("everstep: ") or words or "it said nothing"
    raise ClusterError(f"{said} (pod {name} ended with status {status})")


def _await(
    arguments: argparse.Namespace, cluster: Cluster, namespace: str, name: str
) -> tuple[int, str]:
    from everstep_kubectl import readerpod

    field = quote(f"metadata.name={name}")
    path, waits = f"/api/v1/namespaces/{namespace}/pods?fieldSelector={field}", ""
    heard: threading.Thread | None = None
    for kind, pod in cluster.watch(path, arguments.timeout + 5):
        if kind == "DELETED":
            raise ClusterError(f"pod {name} was deleted before it had read anything")
        if (ended := readerpod.describe_ended(pod)) is not None:
            return ended
        former, waits = waits, readerpod.describe_wait(pod)
        if waits and waits != former:
            _tell(f"pod {name} waits: {waits}")
        if heard is None and readerpod.is_running(pod):
            heard = threading.Thread(target=_hear, args=(cluster, namespace, name), daemon=True)
            heard.start()
    raise ClusterError(
        f"pod {name} had not ended after {arguments.timeout:.0f} s ({waits or _find_word(cluster, namespace, name)}); "
        "--timeout gives it more time"
    )


def _hear(cluster: Cluster, namespace: str, name: str) -> None:
    """Pass on at once that the pod waits for the store, which it may do for minutes."""
    from everstep_contract.fetched import WAITS

    with contextlib.suppress(ClusterError, OSError):
        for line in cluster.lines("logs", "-f", name, "-n", namespace):
            if line.startswith(WAITS):
                _tell(f"pod {name}: {line.removeprefix('everstep: ').rstrip()}")


def _find_word(cluster: Cluster, namespace: str, name: str) -> str:
    """What a pod that runs said last: that it waits for the store, for example."""
    log = ""
    with contextlib.suppress(ClusterError):
        log = cluster.begin("logs", name, "-n", namespace, "--tail=1").text()
    return log.strip().removeprefix("everstep: ") or "it ran"


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

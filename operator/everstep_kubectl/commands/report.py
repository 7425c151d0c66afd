"""`report [JOB]`: a support bundle. It lists what could not be read, and is written even so."""

import argparse
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from everstep_kubectl.cluster import Cluster, ClusterError, NotFound, Object, Reading

if TYPE_CHECKING:
    from everstep_kubectl import bundle

AT_ONCE = 4


def run(arguments: argparse.Namespace, cluster: Cluster) -> int:
    from everstep_kubectl import bundle

    problems: list[str] = []
    asked = bundle.build_objects(arguments.job, arguments.operator_namespace)
    objects = _fetch_objects(cluster, asked, problems)
    if arguments.job and not objects.get("jobs.json"):
        unread = next((p for p in problems if p.startswith("jobs.json: ")), "")
        raise NotFound(
            unread or f"there is no job {arguments.job!r} here; -n names another namespace"
        )
    logs = [
        *bundle.build_logs(objects.get("pods.json", []), "logs", arguments.log_lines),
        *bundle.build_logs(objects.get("operator/pods.json", []), "operator", arguments.log_lines),
    ]
    texts = _fetch_texts(cluster, logs, problems)
    now = time.time()  # noqa: TID251 the bundle is of now
    found = objects.get("jobs.json", [])
    texts |= bundle.build_texts(found, objects.get("quarantines.json", []), now)
    texts |= _fetch_texts(
        cluster, [bundle.Question(path="version.txt", arguments=("version",))], problems
    )
    if not objects.get("operator/pods.json"):
        problems.append(
            f"no pod of the operator (label {bundle.OPERATOR}) in namespace {arguments.operator_namespace}: "
            "--operator-namespace names another"
        )
    texts["problems.txt"] = "\n".join(problems) or "none"
    return _save(arguments, objects, texts, problems, now)


def _fetch_objects(
    cluster: Cluster, asked: "Iterable[bundle.Question]", problems: list[str]
) -> dict[str, list[Object]]:
    """Path → objects; what cannot be read is missing."""
    found: dict[str, list[Object]] = {}
    for part in _batches(list(asked)):
        readings = [(q, _begin(cluster, q.arguments)) for q in part]
        for question, reading in readings:
            try:
                found[question.path] = reading.items()
            except ClusterError as error:
                problems.append(f"{question.path}: {error}")
    return found


def _begin(cluster: Cluster, arguments: tuple[str, ...]) -> Reading:
    if "-n" in arguments:
        return cluster.begin("get", *arguments, "-o", "json")
    return cluster.get(*arguments)


def _fetch_texts(
    cluster: Cluster, asked: "Iterable[bundle.Question]", problems: list[str]
) -> dict[str, str]:
    found: dict[str, str] = {}
    for part in _batches(list(asked)):
        readings = [(q, cluster.begin(*q.arguments)) for q in part]
        for question, reading in readings:
            try:
                found[question.path] = reading.text()
            except ClusterError as error:
                problems.append(f"{question.path}: {error}")
    return found


def _batches(asked: "list[bundle.Question]") -> "Iterable[list[bundle.Question]]":
    return (asked[k : k + AT_ONCE] for k in range(0, len(asked), AT_ONCE))


def _save(
    arguments: argparse.Namespace,
    objects: dict[str, list[Object]],
    texts: dict[str, str],
    problems: list[str],
    now: float,
) -> int:
    from everstep_kubectl import bundle

    root = f"everstep-report-{time.strftime('%Y%m%d-%H%M%S', time.gmtime(now))}"
    path = Path(arguments.file or f"{root}.tar.gz")
    body = bundle.build_archive(root, objects, texts, now)
    with open(path, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as out:
        os.fchmod(out.fileno(), 0o600)  # a file that exists keeps its mode
        out.write(body)
    print(f"{path}: {len(objects) + len(texts)} files, {path.stat().st_size / 1000:.0f} kB")
    for problem in problems:
        print(f"  not in it: {problem}")
    print(
        "  environment values and what looks like a credential were removed; read it before you send it"
    )
    return 0

"""The content of a support bundle: a list of requests, and an archive of the answers."""

import io
import json
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from everstep_contract import names
from everstep_kubectl import jobs, redaction, timeline
from everstep_kubectl.cluster import JOBS, QUARANTINES
from everstep_kubectl.incidents import build_incidents

Raw = Mapping[str, Any]
OPERATOR = "app.kubernetes.io/name in (everstep-operator,everstep-release,everstep-test)"
"""The pods of the chart. Its namespace may hold others, whose logs are nobody's business here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    path: str
    """Path of the answer in the bundle."""
    arguments: tuple[str, ...]
    """Arguments for kubectl."""


def build_objects(job: str | None, operator: str) -> tuple[Question, ...]:
    """Requests for lists of objects, in the namespace unless the arguments name another."""
    label = f"{names.LABEL_JOB}={job}" if job else names.LABEL_JOB
    which = [JOBS, *([f"--field-selector=metadata.name={job}"] if job else [])]
    return (
        Question(path="jobs.json", arguments=tuple(which)),
        Question(path="pods.json", arguments=("pods", "-l", label)),
        Question(path="events.json", arguments=("events",)),
        Question(path="quarantines.json", arguments=(QUARANTINES,)),
        Question(path="nodes.json", arguments=("nodes",)),
        Question(path="operator/pods.json", arguments=("pods", "-n", operator, "-l", OPERATOR)),
        Question(path="operator/events.json", arguments=("events", "-n", operator)),
        Question(path="operator/leases.json", arguments=("leases", "-n", operator)),
        Question(
            path="operator/deployments.json",
            arguments=("deployments", "-n", operator, "-l", OPERATOR),
        ),
    )


def build_logs(pods: Iterable[Raw], folder: str, lines: int) -> tuple[Question, ...]:
    """The log of each container, also of init containers, and the log from before its restart if it
    restarted.
    """
    found: list[Question] = []
    for pod in pods:
        name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
        told = pod.get("status") or {}
        kinds = ("initContainerStatuses", "containerStatuses")
        for status in (status for kind in kinds for status in told.get(kind) or ()):
            call = ("logs", name, "-n", namespace, "-c", status["name"], f"--tail={lines}")
            path = f"{folder}/{name}.{status['name']}"
            found.append(Question(path=f"{path}.log", arguments=call))
            if status.get("restartCount"):
                before = Question(path=f"{path}.before.log", arguments=(*call, "--previous"))
                found.append(before)
    return tuple(found)


def build_texts(found: Sequence[Raw], quarantines: Sequence[Raw], now: float) -> dict[str, str]:
    """The same texts that the commands print."""
    texts: dict[str, str] = {}
    for raw in found:
        name = raw["metadata"]["name"]
        texts[f"{name}.status.txt"] = jobs.render_job(jobs.build_job(raw, now), now)
        built, whole = build_incidents(raw, quarantines), jobs.is_whole(raw)
        texts[f"{name}.timeline.txt"] = timeline.render(name, built, whole=whole, now=now)
    return texts


def build_archive(
    root: str, objects: Mapping[str, Any], texts: Mapping[str, str], now: float
) -> bytes:
    """A tar.gz of everything, in the folder `root`, with all secrets removed."""
    secret = redaction.find_values(objects.values())
    files = {p: redaction.clean_text(t, secret) for p, t in texts.items()}
    for path, value in objects.items():
        clean = redaction.clean_object(value, secret)
        files[path] = json.dumps(clean, indent=1, ensure_ascii=False)
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for path, content in sorted(files.items()):
            entry, body_ = tarfile.TarInfo(f"{root}/{path}"), content.encode()
            entry.size, entry.mtime = len(body_), int(now)
            archive.addfile(entry, io.BytesIO(body_))
    return out.getvalue()

"""Diagnostics that are printed when a story fails."""

import json
from collections.abc import Callable
from typing import Any

from everstep_stories.clusters import Cluster
from everstep_stories.system import System

LINES = 60


def print_artefacts(cluster: Cluster, system: System, namespace: str) -> None:
    """Print the operator's log, Events, the jobs' incidents, pods and their logs. Never raises."""
    sections: tuple[tuple[str, Callable[[], str]], ...] = (
        ("nodes", lambda: cluster.kubectl("get", "nodes", "-o", "wide", check=False)),
        (
            "quarantines",
            lambda: cluster.kubectl("get", "nodequarantines", "-o", "wide", check=False),
        ),
        ("jobs", lambda: _jobs(cluster, namespace)),
        ("pods", lambda: cluster.kubectl("get", "pods", "-A", "-o", "wide", check=False)),
        ("events", lambda: _events(cluster, namespace)),
        ("operator log", system.log),
        ("pod logs", lambda: _pod_logs(cluster, namespace)),
    )
    for title, text in sections:
        print(f"\n--- {title}", flush=True)
        try:
            print(text().rstrip())
        except Exception as error:
            print(f"(could not be read: {error})")


def _events(cluster: Cluster, namespace: str) -> str:
    text = cluster.kubectl(
        "get", "events", "-n", namespace, "--sort-by=.lastTimestamp", check=False
    )
    return "\n".join(text.splitlines()[-LINES:])


def _jobs(cluster: Cluster, namespace: str) -> str:
    found = json.loads(cluster.kubectl("get", "rtj", "-n", namespace, "-o", "json"))
    return "\n".join(line for job in found["items"] for line in build_timeline(job))


def build_timeline(job: dict[str, Any]) -> list[str]:
    """State, conditions and incidents of a job, one line each. Pure."""
    status = job.get("status", {})
    lines = [
        f"{job['metadata']['name']}: {status.get('state')}, step {status.get('step')}, "
        f"epoch {status.get('epoch')}: {status.get('message')}"
    ]
    lines += [
        f"  {c['type']}={c['status']} {c['reason']}: {c['message']}"
        for c in status.get("conditions", [])
    ]
    return lines + [_incident(i) for i in status.get("incidents") or []]


def _incident(incident: dict[str, Any]) -> str:
    marks = ", ".join(f"{m['name']} {m['seconds']:.1f}" for m in incident.get("marks") or [])
    return (
        f"  incident {incident['id']} {incident['cause']} slot {incident.get('slot')} on "
        f"{incident.get('node')}: {incident.get('message')}; {marks}; {incident.get('phases')}; "
        f"lost {incident.get('stepsLost')}"
    )


def _pod_logs(cluster: Cluster, namespace: str) -> str:
    parts = []
    for pod in cluster.kubectl("get", "pods", "-n", namespace, "-o", "name").split():
        text = cluster.kubectl("logs", "-n", namespace, pod, f"--tail={LINES}", check=False)
        parts.append(f"{pod}:\n{text.rstrip()}")
    return "\n".join(parts)

"""An operator with `watchNamespaces` and without health, under the Roles that the chart creates."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from chart_given import apply
from everstep_lab import Lab, chart
from everstep_lab.api import Object
from job_builders import a_spec
from replicas import Replica, connect, until

pytestmark = [pytest.mark.lab, pytest.mark.timeout(240)]
VALUES = ("watchNamespaces={own}", "health.enabled=false")
BOTH = ("watchNamespaces={own,back}", "health.enabled=false")
FLAGS = ("--watch-namespaces=own", "--health=false")
ROLES = ("rbac-jobs.yaml", "policy-jobs.yaml")
NAMESPACES = ("own", "foreign")


@pytest.fixture
def confined(installed: Lab, helm: Path, tmp_path: Path) -> Iterator[Replica]:
    lab = installed
    for name in NAMESPACES:
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
        apply(lab, json.dumps(body))
    lab.kubectl("delete", "clusterrolebinding", "everstep-jobs", "everstep-health")
    apply(lab, chart.render(helm, only=ROLES, values=VALUES))
    replica = Replica(lab, connect(lab, tmp_path), tmp_path, "confined", *FLAGS, account="")
    try:
        until("it is ready", replica.is_ready)
        yield replica
    finally:
        replica.kill()
        # The next test makes them again, which a namespace that still ends would refuse.
        lab.kubectl("delete", "namespace", *NAMESPACES, "--timeout=120s", timeout=130)
        apply(lab, chart.render(helm, only=chart.INSTALLED, values=["observeOnly=false"]))


def a_job(name: str) -> str:
    job: Object = {
        "apiVersion": "everstep.dev/v1alpha1", "kind": "ResilientTrainingJob",
        "metadata": {"name": name}, "spec": a_spec(replicas=1),
    }  # fmt: skip
    return json.dumps(job)


def test_it_runs_jobs_of_its_namespaces_and_hears_of_no_others(
    confined: Replica, installed: Lab
) -> None:
    lab = installed
    lab.kubectl("apply", "-n", "foreign", "-f", "-", stdin=a_job("foreign"))
    lab.kubectl("apply", "-n", "own", "-f", "-", stdin=a_job("first"))
    until("a pod of the first job", lambda: pods(lab, "own") == ["first-0-1"])
    lab.kubectl("apply", "-n", "own", "-f", "-", stdin=a_job("second"))
    until("one of the second", lambda: pods(lab, "own") == ["first-0-1", "second-0-1"])
    foreign = json.loads(lab.kubectl("get", "rtj", "foreign", "-n", "foreign", "-o", "json"))
    assert "status" not in foreign
    assert pods(lab, "foreign") == []
    lab.kubectl("delete", "rtj", "first", "-n", "own")
    until("the first is forgotten", lambda: pods(lab, "own") == ["second-0-1"])
    assert not re.findall(r'outcome="Denied".*', confined.fetch("/metrics"))
    assert "Forbidden" not in confined.said


def test_a_namespace_that_is_gone_stops_no_other(
    confined: Replica, installed: Lab, helm: Path, tmp_path: Path
) -> None:
    """Once it is there again, the next process manages it, too."""
    lab = installed
    confined.kill()
    flags = ("--watch-namespaces=own,back", "--health=false")
    first = Replica(lab, connect(lab, tmp_path), tmp_path, "first", *flags, account="")
    try:
        until("it is ready", first.is_ready)
        assert "the jobs of namespace back are not managed" in first.said
        lab.kubectl("apply", "-n", "own", "-f", "-", stdin=a_job("third"))
        until("a pod of the job", lambda: pods(lab, "own") == ["third-0-1"])
        lab.kubectl("create", "namespace", "back")
        apply(lab, chart.render(helm, only=ROLES, values=BOTH))
        until("the process ends", lambda: first.process.poll() is not None)
        assert first.process.returncode == 1
        assert "the jobs of namespace back may be listed again" in first.said
    finally:
        first.kill()
        lab.kubectl("delete", "namespace", "back", "--ignore-not-found", "--wait=false")


def pods(lab: Lab, namespace: str) -> list[str]:
    found = json.loads(lab.kubectl("get", "pods", "-n", namespace, "-o", "json"))["items"]
    return sorted(p["metadata"]["name"] for p in found if "deletionTimestamp" not in p["metadata"])

"""Helm installs, upgrades and uninstalls a release on a real API server.

The release's pods do not run here, because the lab's nodes lack the image. The hooks are left out
for the same reason; the stories on a cluster with kubelets run them.
"""

import base64
import contextlib
import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import yaml

from chart_given import apply, find, read_documents
from everstep_lab import Lab, chart, kubeconfig
from everstep_lab.api import Object
from everstep_operator import crd
from job_builders import a_spec

pytestmark = pytest.mark.lab

AT_HOME = f"--namespace={chart.NAMESPACE}"
JOBS_CRD = "resilienttrainingjobs.everstep.dev"


@pytest.fixture
def run_helm(installed: Lab, helm: Path) -> Iterator["Helm"]:
    """Helm, on a lab in which the objects were installed without it. They are restored at the end."""
    yield Helm(installed, helm)
    Helm(installed, helm)("uninstall", "everstep", "--no-hooks", "--ignore-not-found")
    installed.kubectl("delete", "secret", "everstep-operator-key", AT_HOME, "--ignore-not-found")
    text = chart.render(helm, only=chart.INSTALLED, values=["observeOnly=false"])
    apply(installed, text)


class Helm:
    def __init__(self, lab: Lab, helm: Path) -> None:
        self._command = [str(helm), f"--kubeconfig={lab.kubeconfig}", AT_HOME]

    def __call__(self, *arguments: str, fails: bool = False) -> str:
        done = subprocess.run(
            [*self._command, *arguments], capture_output=True, text=True, timeout=120, check=False
        )
        assert (done.returncode != 0) is fails, done.stdout + done.stderr
        return done.stderr if fails else done.stdout


def get(lab: Lab, *arguments: str) -> Object:
    document: Object = json.loads(lab.kubectl("get", *arguments, "-o", "json"))
    return document


def key_of(lab: Lab) -> bytes:
    return base64.b64decode(get(lab, "secret", "everstep-operator-key", AT_HOME)["data"]["key"])


@pytest.mark.timeout(600)
def test_the_life_of_a_release(run_helm: Helm, installed: Lab) -> None:
    lab, folder = installed, str(chart.FOLDER)
    assert "cannot be imported" in run_helm("install", "everstep", folder, fails=True)
    said = run_helm("install", "everstep", folder, "--take-ownership")
    assert "observe-only mode" in said
    key = key_of(lab)
    assert len(key) == 64

    # An upgrade finds a CRD of another version.
    lab.kubectl("patch", "crd", JOBS_CRD, "--type=merge", "-p", _other_columns())
    said = run_helm("upgrade", "everstep", folder, "--reuse-values", "--set=observeOnly=false")
    assert "A node with a bad GPU is cordoned" in said
    assert key_of(lab) == key
    wanted = next(r for r in crd.resources() if crd.build_crd(r)["metadata"]["name"] == JOBS_CRD)
    columns = crd.build_crd(wanted)["spec"]["versions"][0]["additionalPrinterColumns"]
    found = get(lab, "crd", JOBS_CRD)["spec"]["versions"][0]["additionalPrinterColumns"]
    assert found == columns

    assert "cannot be imported" in run_helm("install", "second", folder, fails=True)

    lab.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(a_job()))
    run_helm("uninstall", "everstep", "--no-hooks")
    assert get(lab, "rtj", "stays", "-n", "default")["spec"]["suspend"] is True
    left = lab.kubectl("get", "clusterrole,validatingadmissionpolicy", "-o", "name")
    assert "everstep-operator" not in left
    assert "everstep-nodes" not in left
    assert key_of(lab) == key

    run_helm("install", "everstep", folder)
    assert key_of(lab) == key, "a new key would make the tokens of running jobs invalid"
    lab.kubectl("delete", "rtj", "stays", "-n", "default")


def _other_columns() -> str:
    version = crd.build_crd(crd.resources()[0])["spec"]["versions"][0]
    column = {"name": "Old", "type": "string", "jsonPath": ".metadata.name"}
    return json.dumps({"spec": {"versions": [{**version, "additionalPrinterColumns": [column]}]}})


def a_job() -> Object:
    return {
        "apiVersion": "everstep.dev/v1alpha1", "kind": "ResilientTrainingJob",
        "metadata": {"name": "stays", "namespace": "default"},
        "spec": {**a_spec(), "suspend": True},
    }  # fmt: skip


class Ready(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def ready_url() -> Iterator[str]:
    """Yield the URL of a server that stands in for the operator's Service."""
    server = HTTPServer(("127.0.0.1", 0), Ready)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_helms_test_says_what_is_missing(
    installed: Lab, defaults: list[Object], ready_url: str, tmp_path: Path
) -> None:
    """Runs the test pod's own script with its own account, but not in a pod."""
    for kind in ("ServiceAccount", "Role", "RoleBinding"):
        apply(installed, json.dumps(find(defaults, kind, "everstep-test")))
    token = installed.kubectl("create", "token", "everstep-test", AT_HOME)
    (tmp_path / "token").write_text(token.strip())
    (tmp_path / "ca.crt").write_bytes((installed.places.certs / "ca.crt").read_bytes())
    lease = {
        "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
        "metadata": {"name": "everstep-operator", "namespace": chart.NAMESPACE},
        "spec": {"holderIdentity": ""},
    }  # fmt: skip
    apply(installed, json.dumps(lease))
    script = find(defaults, "Pod", "everstep-test")["spec"]["containers"][0]["args"][0]
    environ = {
        "EVERSTEP_API": kubeconfig.read(installed.kubeconfig)[0],
        "EVERSTEP_ACCOUNT": str(tmp_path),
        "EVERSTEP_NAMESPACE": chart.NAMESPACE,
        "EVERSTEP_OPERATOR_URL": ready_url,
        "EVERSTEP_PATIENCE": "0",
    }
    assert "no   a replica leads: the Lease everstep-operator has no holder" in run(
        script, environ, 1
    )
    lease["spec"] = {"holderIdentity": "everstep-operator-x", "renewTime": at(0)}
    apply(installed, json.dumps(lease))
    assert "everstep-operator-x holds the Lease everstep-operator and does not renew it" in run(
        script, {**environ, "EVERSTEP_RENEWAL": "0"}, 1
    )
    with renewed(installed):
        said = run(script, environ, 0)
    assert said.splitlines() == [
        "yes  kinds are served", "yes  operator is ready", "yes  a replica leads",
    ]  # fmt: skip
    assert "no   operator is ready" in run(
        script, {**environ, "EVERSTEP_OPERATOR_URL": "http://127.0.0.1:9"}, 1
    )


@contextlib.contextmanager
def renewed(lab: Lab) -> Iterator[None]:
    """Renew the operator's Lease as a replica that leads does."""
    over = threading.Event()

    def renew() -> None:
        for number in itertools.count(1):
            if over.wait(0.1):
                return
            change = json.dumps({"spec": {"renewTime": at(number)}})
            lab.kubectl(
                "patch", "lease", "everstep-operator", AT_HOME, "--type=merge", "-p", change
            )

    leads = threading.Thread(target=renew)
    leads.start()
    try:
        yield
    finally:
        over.set()
        leads.join()


def at(microsecond: int) -> str:
    return f"2026-01-01T00:00:00.{microsecond:06d}Z"


def run(script: str, environ: dict[str, str], status: int) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def test_the_rendered_key_is_made_anew_only_where_there_is_none(helm: Path) -> None:
    keys = {
        find(read_documents(chart.render(helm, only=["key.yaml"])), "Secret", name)["data"]["key"]
        for name in ["everstep-operator-key"] * 2
    }
    assert len(keys) == 2, (
        "without a cluster, each rendering must draw a new key (see key.existingSecret)"
    )
    shown = chart.render(helm, values=["key.existingSecret=mine"])
    documents = read_documents(shown)
    assert [d for d in documents if d["kind"] == "Secret"] == []
    pod = find(documents, "Deployment", "everstep-operator")["spec"]["template"]["spec"]
    assert pod["volumes"][0]["secret"]["secretName"] == "mine"

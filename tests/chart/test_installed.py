"""The script of `helm test`, with an API server of a few lines: does it notice that nobody leads?"""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import certifi
import pytest

from everstep_lab import chart

SCRIPT = chart.FOLDER / "files" / "installed.py"
KINDS = [{"name": "resilienttrainingjobs"}, {"name": "nodequarantines"}]


class Cluster(ThreadingHTTPServer):
    """Also answers for the operator, which is ready."""

    renews = False
    reads = 0

    def answer(self, path: str) -> dict[str, object]:
        if not path.endswith("/leases/everstep-operator"):
            return {"resources": KINDS}
        self.reads += 1
        renewed = self.reads if self.renews else 0
        spec = {
            "holderIdentity": "everstep-operator-x",
            "renewTime": f"2026-11-27T00:00:{renewed:02}Z",
        }
        return {"spec": spec}


class Handler(BaseHTTPRequestHandler):
    server: Cluster

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(self.server.answer(self.path)).encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def check(cluster: Cluster, folder: Path) -> tuple[int, str]:
    (folder / "token").write_text("t")
    (folder / "ca.crt").write_bytes(Path(certifi.where()).read_bytes())
    url = f"http://127.0.0.1:{cluster.server_port}"
    environ = {
        "EVERSTEP_API": url, "EVERSTEP_OPERATOR_URL": url, "EVERSTEP_ACCOUNT": str(folder),
        "EVERSTEP_NAMESPACE": "ns", "EVERSTEP_PATIENCE": "0", "EVERSTEP_RENEWAL": "0.1",
    }  # fmt: skip
    command = [sys.executable, str(SCRIPT)]
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stdout


def test_a_holder_that_renews_its_lease_leads(cluster: Cluster, tmp_path: Path) -> None:
    cluster.renews = True
    status, said = check(cluster, tmp_path)
    assert status == 0
    assert "yes  a replica leads" in said


def test_a_holder_that_is_gone_does_not_lead(cluster: Cluster, tmp_path: Path) -> None:
    status, said = check(cluster, tmp_path)
    assert status == 1
    assert "no   a replica leads: everstep-operator-x holds the Lease" in said
    assert "yes  operator is ready" in said

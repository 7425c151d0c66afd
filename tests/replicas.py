"""Operator processes beside a lab, with the rights that the chart grants."""

import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from chart_given import apply
from everstep_lab import Lab, chart, kubeconfig

LEASE = "everstep-system/everstep-operator"
ELECTION = ("--lease-seconds=10", "--renew-seconds=7", "--retry-seconds=1", f"--lease={LEASE}")
FLAGS = ("--http-port=0", "--scrape-seconds=1", "--agent-seconds=0.5", "--figures-seconds=0.5")
TOKEN_HOURS = 24
"""The default is one hour. A longer test would then fail, because the API server refuses its requests."""
ACCOUNT = "--nodes-service-account=everstep-system/everstep-nodes"


def install(lab: Lab, folder: Path) -> Path:
    """Install the chart's CRDs, rights and policies; return the operator account's kubeconfig."""
    apply(lab, chart.read_installed(observe_only=False))
    lab.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")
    return connect(lab, folder)


def connect(lab: Lab, folder: Path) -> Path:
    """A kubeconfig of the operator's account, which must exist."""
    url, _ = kubeconfig.read(lab.kubeconfig)
    authority = (lab.places.certs / "ca.crt").read_bytes()
    account = ("create", "token", "everstep-operator", "-n", "everstep-system")
    token = lab.kubectl(*account, f"--duration={TOKEN_HOURS}h").strip()
    path = folder / "operator.kubeconfig"
    kubeconfig.write_private(path, kubeconfig.build(url, authority, token, "everstep-operator"))
    return path


def start(command: str, config: Path, log: Path, *flags: str) -> subprocess.Popen[bytes]:
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(log.parent),
        "KUBECONFIG": str(config),
        "EVERSTEP_OPERATOR_KEY": "k" * 32,
    }
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "everstep_operator", command, *ELECTION, *flags],
            env=environment, stdout=file, stderr=file,
        )  # fmt: skip


class Replica:
    def __init__(
        self, lab: Lab, config: Path, folder: Path, name: str, *flags: str, account: str = ACCOUNT
    ) -> None:
        host = f"--http-host={lab.places.operator_ip}"
        self.log = folder / f"{name}.log"
        own = (*FLAGS, host, f"--identity={name}", *filter(None, [account]), *flags)
        self.process = start("run", config, self.log, *own)

    @property
    def said(self) -> str:
        return self.log.read_text()

    def fetch(self, path: str) -> str:
        """Return the text of a page; empty while the replica does not answer."""
        found = re.search(r"metrics on \('([\d.]+)', (\d+)\)", self.said)
        if found is None:
            assert self.process.poll() is None, self.said
            return ""
        try:
            with urllib.request.urlopen(f"http://{found[1]}:{found[2]}{path}", timeout=3) as answer:
                return str(answer.read().decode())
        except (urllib.error.URLError, OSError):
            return ""

    def is_ready(self) -> bool:
        return "ok" in self.fetch("/readyz")

    def leads(self) -> bool:
        return "everstep_operator_leader 1.0" in self.fetch("/metrics")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def until(what: str, happens: Callable[[], bool], limit: float = 90.0) -> float:
    """Wait until `happens` is true; return the seconds that it took."""
    began = time.monotonic()
    while not happens():
        if time.monotonic() - began > limit:
            raise AssertionError(f"not within {limit:.0f} s: {what}")
        time.sleep(0.05)
    return time.monotonic() - began


def is_cordoned(lab: Lab, node: str) -> bool:
    document = json.loads(lab.kubectl("get", "node", node, "-o", "json"))
    return bool(document["spec"].get("unschedulable"))

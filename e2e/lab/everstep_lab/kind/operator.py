"""The operator of the kind lab: Helm installs its chart; kubectl controls its pods."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from everstep_lab.kind.images import REPOSITORY
from everstep_lab.seam import LabError

RELEASE, NAMESPACE = "everstep", "everstep-system"
CHART = REPOSITORY / "charts" / "everstep"
SELECTOR = "app.kubernetes.io/name=everstep-operator"
_LEASE = "everstep-operator"
_QUICK = ("--scrape-seconds=1", "--scrape-timeout-seconds=2", "--agent-seconds=0.5")


class Cluster(Protocol):
    def kubectl(
        self, *arguments: str, stdin: str | None = None, check: bool = True, timeout: float = 60.0
    ) -> str: ...
    def helm(self, *arguments: str, check: bool = True, timeout: float = 300.0) -> str: ...


def start(lab: Cluster, arguments: Sequence[str]) -> str:
    """Install the chart, or upgrade it.

    Raises LabError with Helm's message and the end of the pods' logs if it does not become ready.
    """
    if not Path(CHART / "Chart.yaml").exists():
        raise LabError(
            f"there is no chart in {CHART}: use `up --kind --no-operator`, or a whole checkout"
        )
    try:
        lab.helm(*build_install(arguments), timeout=240)
    except LabError as error:
        raise LabError(f"{error}\n{logs(lab, tail=20)}") from None
    return f"operator installed: release {RELEASE} in {NAMESPACE}"


def build_install(arguments: Sequence[str]) -> list[str]:
    """The arguments of `helm`.

    As in the local lab, the operator is armed (it cordons nodes) and scrapes once a second.
    """
    extra = json.dumps([*_QUICK, *arguments])
    return [
        "upgrade", "--install", RELEASE, str(CHART), "--namespace", NAMESPACE,
        "--create-namespace", "--wait", "--timeout", "180s",
        "--set", "observeOnly=false", "--set-json", f"extraArgs={extra}",
    ]  # fmt: skip


def stop(lab: Cluster) -> str:
    _scale(lab, 0)
    return "operator stopped"


def restart(lab: Cluster) -> str:
    lab.kubectl("-n", NAMESPACE, "rollout", "restart", _deployment(lab))
    lab.kubectl(
        "-n", NAMESPACE, "rollout", "status", _deployment(lab), "--timeout=120s", timeout=130
    )
    return "operator restarted"


def kill(lab: Cluster) -> str:
    pod = leader(lab)
    lab.kubectl("-n", NAMESPACE, "delete", "pod", pod, "--grace-period=0", "--force")
    return f"operator {pod} killed"


def leader(lab: Cluster) -> str:
    """The pod that the Lease names, else the first one. Raises LabError if there is none."""
    holder = lab.kubectl(
        "-n", NAMESPACE, "get", "lease", _LEASE, "-o=jsonpath={.spec.holderIdentity}", check=False
    )
    pods = [str(pod["metadata"]["name"]) for pod in _pods(lab)]
    found = [pod for pod in pods if holder.startswith(pod)] or pods
    if not found:
        raise LabError("the operator does not run: start it with `everstep-lab operator start`")
    return found[0]


def logs(lab: Cluster, tail: int = -1) -> str:
    return lab.kubectl(*build_logs(tail=tail), check=False)


def build_logs(*, tail: int = -1, follow: bool = False) -> list[str]:
    more = ["--follow"] if follow else []
    return ["-n", NAMESPACE, "logs", "-l", SELECTOR, "--prefix", f"--tail={tail}", *more]


def describe(lab: Cluster) -> dict[str, Any]:
    try:
        pods = _pods(lab)
    except LabError as error:
        return {"pods": [], "error": str(error).splitlines()[-1]}
    return {"pods": [{"name": p["metadata"]["name"], "ready": _is_ready(p)} for p in pods]}


def _scale(lab: Cluster, replicas: int) -> None:
    lab.kubectl("-n", NAMESPACE, "scale", _deployment(lab), f"--replicas={replicas}")
    end = time.monotonic() + 60
    while _pods(lab) and not replicas:
        if time.monotonic() > end:
            raise LabError(
                "the operator's pods still exist after 60 s; see `everstep-lab kubectl get pods -A`"
            )
        time.sleep(0.3)


def _deployment(lab: Cluster) -> str:
    names = lab.kubectl("-n", NAMESPACE, "get", "deployment", "-l", SELECTOR, "-o=name").split()
    if not names:
        raise LabError(
            "the operator is not installed: install it with `everstep-lab operator start`"
        )
    return names[0]


def _pods(lab: Cluster) -> list[dict[str, Any]]:
    text = lab.kubectl("-n", NAMESPACE, "get", "pods", "-l", SELECTOR, "-o=json")
    items: list[dict[str, Any]] = json.loads(text)["items"]
    return [pod for pod in items if "deletionTimestamp" not in pod["metadata"]]


def _is_ready(pod: dict[str, Any]) -> bool:
    conditions = pod.get("status", {}).get("conditions", [])
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)

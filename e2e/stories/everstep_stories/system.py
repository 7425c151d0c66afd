"""The installed operator: a Helm release, or a process on the local lab."""

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

from everstep_demo.board import Object
from everstep_lab.seam import LabError
from everstep_stories.clusters import Cluster, NotHereError

REPOSITORY = Path(__file__).parents[3]
CHART = REPOSITORY / "charts" / "everstep"
RELEASE, NAMESPACE = "everstep", "everstep-system"
APP_VERSION = "0.1.0"
LEASE = "everstep-operator"
SELECTOR = f"app.kubernetes.io/name=everstep-operator,app.kubernetes.io/instance={RELEASE}"
# Not observe-only, as in the README. Two of three nodes may be cordoned, and status is updated
# often enough for tests.
VALUES = {
    "observeOnly": False,
    "cordonBudget": "2",
    "scrapeSeconds": 1,
    "extraArgs": ["--figures-seconds=1", "--agent-seconds=0.5"],
}


class System:
    """The operator on a cluster. Without Helm, `helm` and `install` raise NotHereError."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._helm: Any = getattr(cluster, "helm", None)
        self._prepared = False

    @property
    def by_helm(self) -> bool:
        return self._helm is not None

    def helm(self, *arguments: str, timeout: float = 300.0) -> str:
        if self._helm is None:
            raise NotHereError("the local lab runs the operator without Helm")
        return str(self._helm(*arguments, timeout=timeout))

    def install(self, chart: Path = CHART) -> float:
        """Install or upgrade the release with VALUES; return the seconds until it was ready.

        Only the first call does so; later calls return 0.
        """
        began = time.monotonic()
        if self._prepared:
            return 0.0
        self.helm(
            "upgrade", "--install", RELEASE, str(chart), "--namespace", NAMESPACE,
            "--create-namespace", "--wait", "--timeout", "180s", *self._settings(),
            timeout=240,
        )  # fmt: skip
        self._prepared = True
        return time.monotonic() - began

    def _settings(self) -> list[str]:
        settings = [f"--set-json={k}={json.dumps(v)}" for k, v in VALUES.items()]
        if repository := os.environ.get("EVERSTEP_E2E_OPERATOR_REPOSITORY"):
            settings.append(f"--set=image.repository={repository}")
        return settings

    def pods(self) -> list[Object]:
        """The operator's pods, except terminating ones."""
        text = self.cluster.kubectl("get", "pods", "-n", NAMESPACE, "-l", SELECTOR, "-o", "json")
        found: list[Object] = json.loads(text)["items"]
        return [p for p in found if "deletionTimestamp" not in p["metadata"]]

    def leader(self) -> str:
        """The pod that holds the Lease; empty if none does."""
        text = self.cluster.kubectl(
            "get", "lease", "-n", NAMESPACE, LEASE, "-o", "json", check=False
        )
        try:
            holder = str(json.loads(text)["spec"].get("holderIdentity") or "")
        except (ValueError, KeyError):
            return ""
        return holder.partition("_")[0]

    async def until_leader(self, *, other_than: str = "", limit: float = 60.0) -> tuple[str, float]:
        """Wait for a leader; return its pod, which holds the Lease, and the seconds waited."""
        began = time.monotonic()
        while time.monotonic() - began < limit:
            found = await asyncio.to_thread(self.leader)
            if found and found != other_than:
                return found, time.monotonic() - began
            await asyncio.sleep(0.3)
        raise LabError(f"no leader other than '{other_than}' after {limit:.0f} s")

    def log(self) -> str:
        """The last log lines of all replicas."""
        if not self.by_helm:
            path: Path = self.cluster.operator_log  # type: ignore[attr-defined]
            return "\n".join(path.read_text(errors="replace").splitlines()[-150:])
        return self.cluster.kubectl(
            "logs", "-n", NAMESPACE, "-l", SELECTOR, "--tail=150", "--prefix", check=False
        )

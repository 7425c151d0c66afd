"""The operator's process.

It authenticates with a token of its own ServiceAccount. The lab installs the CRDs, rights and
policies of the chart, and no others.
"""

import asyncio
import secrets
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from everstep_lab import chart, kubeconfig, procs
from everstep_lab.api import Api, Object
from everstep_lab.places import Places, choose_port
from everstep_lab.seam import LabError

NAMESPACE = chart.NAMESPACE
ACCOUNT = "everstep-operator"
NODES_ACCOUNT = "everstep-nodes"
_TOKEN_SECONDS = 24 * 3600
_READY_SECONDS = 180.0
_CRD_PATH = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


class Operator:
    """One `everstep-operator` process.

    It keeps its signing key over restarts. In a real cluster the key is in a Secret.
    """

    def __init__(
        self,
        places: Places,
        kubectl: Path,
        *,
        url: str,
        ca: Path,
        args: Sequence[str] = (),
    ) -> None:
        self._places, self._kubectl = places, kubectl
        self._url, self._ca = url, ca
        self._args = tuple(args)
        self._key = secrets.token_hex(32)
        self._port = choose_port(places.operator_ip, 8080)
        self._process: subprocess.Popen[bytes] | None = None
        self._installed = False
        self.log = places.logs / "operator.log"
        self.kubeconfig = places.root / "operator.kubeconfig"

    @property
    def metrics_url(self) -> str:
        return f"http://{self._places.operator_ip}:{self._port}/metrics"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process and self._process.poll() is None else None

    @property
    def ended(self) -> int | None:
        """The exit status if it ended unexpectedly, else None."""
        return self._process.poll() if self._process else None

    async def start(self, api: Api) -> None:
        """Start the process and wait until it is ready. The first start installs the chart's parts.

        Raises LabError with the end of the log if the process ends or is not ready in time.
        """
        if self.pid is not None:
            return
        if not self._installed:
            await self._install(api)
            self._installed = True
        self._process = procs.spawn(
            [sys.executable, "-m", "everstep_operator", *self._flags()],
            log=self.log, mark=self._places.root, cwd=self._places.root,
            env=self._environment(),
        )  # fmt: skip

        await self._until_ready()

    async def _until_ready(self) -> None:
        for _ in range(round(_READY_SECONDS / 0.1)):
            if self.ended is not None:
                raise LabError(f"the operator ended with {self.ended}:\n{procs.tail(self.log)}")
            if await asyncio.to_thread(self._is_ready):
                return
            await asyncio.sleep(0.1)
        raise LabError(
            f"the operator is not ready after {_READY_SECONDS:.0f} s:\n{procs.tail(self.log)}"
        )

    def _is_ready(self) -> bool:
        url = f"http://{self._places.operator_ip}:{self._port}/readyz"
        try:
            with urllib.request.urlopen(url, timeout=2) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def stop(self) -> None:
        if self._process is not None:
            procs.stop(self._process)
            self._process = None

    def kill(self) -> int:
        """Send SIGKILL. Returns the pid. Raises LabError if the operator does not run."""
        pid = self.pid
        if self._process is None or pid is None:
            raise LabError("the operator does not run: start it with `everstep-lab operator start`")
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        self._process = None
        return pid

    def _flags(self) -> list[str]:
        return [
            f"--http-host={self._places.operator_ip}",
            f"--http-port={self._port}",
            "--scrape-seconds=1",
            "--scrape-timeout-seconds=2",
            "--agent-seconds=0.5",
            f"--nodes-service-account={NAMESPACE}/{NODES_ACCOUNT}",
            *self._args,
        ]

    def _environment(self) -> dict[str, str]:
        # The caller's environment must not change what the operator does.
        return {
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
            "HOME": str(self._places.root),
            "KUBECONFIG": str(self.kubeconfig),
            "EVERSTEP_OPERATOR_KEY": self._key,
            "PYTHONUNBUFFERED": "1",
        }

    async def _install(self, api: Api) -> None:
        await self._apply_manifests()
        await _until_established(api)
        path = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{ACCOUNT}/token"
        spec: Object = {"expirationSeconds": _TOKEN_SECONDS}
        answer = await api.create(
            path, {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        )
        document = kubeconfig.build(
            self._url, self._ca.read_bytes(), answer["status"]["token"], ACCOUNT
        )
        kubeconfig.write_private(self.kubeconfig, document)

    async def _apply_manifests(self) -> None:
        manifests = chart.read_installed(observe_only=self._observes)
        process = await asyncio.create_subprocess_exec(
            str(self._kubectl), f"--kubeconfig={self._places.kubeconfig}", "apply", "-f", "-",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        out, _ = await process.communicate(manifests.encode())
        if process.returncode != 0:
            raise LabError(f"`kubectl apply` of the chart's rights failed:\n{out.decode()}")

    @property
    def _observes(self) -> bool:
        return any(arg in ("--observe-only", "--observe-only=true") for arg in self._args)


async def _until_established(api: Api) -> None:
    for _ in range(300):
        if all(map(_is_established, await api.list(_CRD_PATH))):
            return
        await asyncio.sleep(0.1)
    raise LabError("the CRDs are not established after 30 s: see `kubectl describe crd`")


def _is_established(crd: Object) -> bool:
    conditions = crd.get("status", {}).get("conditions", [])
    return any(c["type"] == "Established" and c["status"] == "True" for c in conditions)

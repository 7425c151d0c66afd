"""etcd, kube-apiserver, kube-controller-manager and kube-scheduler: real processes, on loopback.

The lab's README explains each unusual flag.
"""

import asyncio
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from everstep_lab import certs, kubeconfig, procs
from everstep_lab.api import Api, ApiError, UnreachableError
from everstep_lab.places import Places, choose_port
from everstep_lab.seam import LabError

SERVICE_CIDR = "127.96.0.0/16"
_READY_SECONDS = 120.0
_COMPONENTS = ("kube-controller-manager", "kube-scheduler")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Bearer tokens of the user `admin`, of the components and of the nodes."""

    admin: str
    components: Mapping[str, str]
    nodes: Mapping[str, str]

    @classmethod
    def draw(cls, nodes: Iterable[str]) -> "Tokens":
        return cls(
            admin=secrets.token_hex(16),
            components={name: secrets.token_hex(16) for name in _COMPONENTS},
            nodes={name: secrets.token_hex(16) for name in nodes},
        )

    def to_csv(self) -> str:
        """The content of the API server's --token-auth-file: rows of token, user, uid, groups."""
        rows = [f'{self.admin},admin,admin,"system:masters"']
        rows += [f"{token},system:{name},{name}" for name, token in self.components.items()]
        rows += [
            f'{token},system:node:{name},{name},"system:nodes"'
            for name, token in self.nodes.items()
        ]
        return "\n".join(rows) + "\n"


class ControlPlane:
    """Owns the four processes. `start` waits until the API server is ready."""

    def __init__(
        self,
        binaries: Path,
        places: Places,
        *,
        tokens: Tokens,
        authority: certs.Authority,
        node_grace_seconds: int,
    ) -> None:
        self._binaries, self._places, self._tokens = binaries, places, tokens
        self._grace = node_grace_seconds
        self._authority = authority
        self.ca = authority.certificate
        self._ip = places.control_ip
        self._port = choose_port(self._ip, 6443)
        self._etcd = f"http://{self._ip}:{choose_port(self._ip, 2379)}"
        self._etcd_peer = f"http://{self._ip}:{choose_port(self._ip, 2380)}"
        self._data = places.memory / "etcd"
        self._kept = places.memory / "etcd-kept"
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def url(self) -> str:
        return f"https://{self._ip}:{self._port}"

    async def start(self) -> None:
        """Start the four processes.

        Raises LabError with the end of the log if the API server is not ready in time, or if etcd
        or the API server ends before that.
        """
        self._write_files()
        await self._launch()

    async def _launch(self) -> None:
        self._spawn("etcd", self._etcd_flags())
        self._spawn("kube-apiserver", self._apiserver_flags())
        await self._until_ready()
        self._spawn("kube-controller-manager", self._controller_manager_flags())
        self._spawn("kube-scheduler", self._scheduler_flags())

    def keep_etcd(self) -> None:
        """Copy etcd's current data, like a backup. The new copy replaces the previous one."""
        etcd = self._running["etcd"]
        etcd.send_signal(signal.SIGSTOP)
        try:
            shutil.rmtree(self._kept, ignore_errors=True)
            shutil.copytree(self._data, self._kept)
        finally:
            etcd.send_signal(signal.SIGCONT)

    async def restore_etcd(self) -> None:
        """Stop the control plane, replace etcd's data with the copy, and start again.

        This is the order that etcd's documentation advises. Raises LabError if there is no copy.
        """
        if not self._kept.exists():
            raise LabError("there is no copy of etcd's data: call `etcd_keep` first")
        self.stop()
        shutil.rmtree(self._data)
        shutil.copytree(self._kept, self._data)
        await self._launch()

    def check(self) -> None:
        """Raise LabError if a process ended unexpectedly."""
        for name, process in self._running.items():
            if process.poll() is not None:
                raise LabError(
                    f"{name} ended with {process.returncode}:\n{procs.tail(self._log(name))}"
                )

    def pids(self) -> dict[str, int]:
        return {name: process.pid for name, process in self._running.items()}

    def stop(self) -> None:
        """Send SIGKILL to the processes, in reverse order. Their data need not be kept."""
        for process in reversed(self._running.values()):
            procs.stop(process, grace=0.0)
        self._running.clear()

    def _spawn(self, name: str, flags: list[str]) -> None:
        argv = [str(self._binaries / name), *flags]
        process = procs.spawn(argv, log=self._log(name), mark=self._places.root)
        # If training delays a heartbeat by seconds, a healthy node becomes NotReady.
        procs.prefer(process.pid)
        self._running[name] = process

    def _log(self, name: str) -> Path:
        return self._places.logs / f"{name}.log"

    async def _until_ready(self) -> None:
        end = time.monotonic() + _READY_SECONDS
        async with Api(self.url, token=self._tokens.admin, ca=self.ca) as api:
            while not await _is_ready(api):
                self.check()
                if time.monotonic() > end:
                    tail = procs.tail(self._log("kube-apiserver"))
                    raise LabError(
                        f"kube-apiserver is not ready after {_READY_SECONDS:.0f} s:\n{tail}"
                    )
                await asyncio.sleep(0.1)

    def _write_files(self) -> None:
        folder = self._places.certs
        hosts = [self._ip, "localhost", "kubernetes.default.svc", "127.96.0.1"]
        self._authority.issue("apiserver", "kube-apiserver", hosts)
        self._authority.issue("kubelet-client", "kube-apiserver")
        certs.write_signing_key(folder / "service-account.key")
        kubeconfig.write_private(folder / "tokens.csv", self._tokens.to_csv())
        for name, token in self._tokens.components.items():
            document = kubeconfig.build(self.url, self.ca.read_bytes(), token, name)
            kubeconfig.write_private(folder / f"{name}.kubeconfig", document)

    def _etcd_flags(self) -> list[str]:
        return [
            f"--data-dir={self._data}",
            f"--listen-client-urls={self._etcd}",
            f"--advertise-client-urls={self._etcd}",
            f"--listen-peer-urls={self._etcd_peer}",
            f"--initial-advertise-peer-urls={self._etcd_peer}",
            f"--initial-cluster=default={self._etcd_peer}",
            "--unsafe-no-fsync",
            "--log-level=warn",
        ]

    def _apiserver_flags(self) -> list[str]:
        folder = self._places.certs
        return [
            f"--etcd-servers={self._etcd}",
            f"--bind-address={self._ip}",
            f"--advertise-address={self._ip}",
            f"--secure-port={self._port}",
            f"--tls-cert-file={folder / 'apiserver.crt'}",
            f"--tls-private-key-file={folder / 'apiserver.key'}",
            f"--cert-dir={folder}",
            f"--token-auth-file={folder / 'tokens.csv'}",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--anonymous-auth=false",
            f"--service-account-key-file={folder / 'service-account.key'}",
            f"--service-account-signing-key-file={folder / 'service-account.key'}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-cluster-ip-range={SERVICE_CIDR}",
            "--endpoint-reconciler-type=none",
            f"--kubelet-certificate-authority={self.ca}",
            f"--kubelet-client-certificate={folder / 'kubelet-client.crt'}",
            f"--kubelet-client-key={folder / 'kubelet-client.key'}",
            "--kubelet-preferred-address-types=InternalIP",
        ]

    def _controller_manager_flags(self) -> list[str]:
        folder = self._places.certs
        return [
            *self._component_flags("kube-controller-manager"),
            "--controllers=*,-endpoints-controller,-endpointslice-controller,"
            "-endpointslice-mirroring-controller",
            f"--service-account-private-key-file={folder / 'service-account.key'}",
            "--use-service-account-credentials=true",
            f"--root-ca-file={self.ca}",
            f"--node-monitor-grace-period={self._grace}s",
            "--node-monitor-period=1s",
        ]

    def _scheduler_flags(self) -> list[str]:
        return self._component_flags("kube-scheduler")

    def _component_flags(self, name: str) -> list[str]:
        config = self._places.certs / f"{name}.kubeconfig"
        return [
            f"--kubeconfig={config}",
            f"--authentication-kubeconfig={config}",
            f"--authorization-kubeconfig={config}",
            "--leader-elect=false",
            f"--bind-address={self._ip}",
            "--secure-port=0",
        ]


async def _is_ready(api: Api) -> bool:
    try:
        return await api.text("/readyz") == "ok"
    except (ApiError, UnreachableError):
        return False

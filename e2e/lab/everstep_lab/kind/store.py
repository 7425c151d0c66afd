"""Stops the kind lab's S3 server, makes it hang or refuse its keys, and undoes these faults.

Its data are kept.
"""

import secrets
from typing import Protocol

from everstep_lab.kind import places, tools

_DEPLOYMENT = f"deployment/{places.STORE}"
_RULE = ["FORWARD", "-p", "tcp", "--dport", str(places.STORE_PORT), "-j", "DROP"]


class Cluster(Protocol):
    def kubectl(
        self, *arguments: str, stdin: str | None = None, check: bool = True, timeout: float = 60.0
    ) -> str: ...


def stop(lab: Cluster) -> str:
    _kubectl(lab, "scale", _DEPLOYMENT, "--replicas=0")
    _wait(lab)
    pods = ["wait", "pod", "-l", f"app.kubernetes.io/name={places.STORE}", "--for=delete"]
    _kubectl(lab, *pods, "--timeout=30s", check=False)
    return "object store stopped; its data are kept"


def hang(control_plane: str) -> str:
    """Drop all packets to the server, except those of its node's kubelet.

    Its pod stays Ready, but no client gets an answer.
    """
    if not _is_cut_off(control_plane):
        _iptables(control_plane, "-I")
    return "object store does not answer"


def refuse(lab: Cluster) -> str:
    """Restart the server with another password, so that it refuses its clients' keys."""
    _set_password(lab, secrets.token_hex(16))
    return "object store refuses the keys"


def start(lab: Cluster, control_plane: str, password: str) -> None:
    """Undo `stop`, `hang` and `refuse`."""
    if _is_cut_off(control_plane):
        _iptables(control_plane, "-D")
    _set_password(lab, password)
    _kubectl(lab, "scale", _DEPLOYMENT, "--replicas=1")
    _wait(lab)


def _set_password(lab: Cluster, password: str) -> None:
    _kubectl(lab, "set", "env", _DEPLOYMENT, f"MINIO_ROOT_PASSWORD={password}")
    _wait(lab)


def _wait(lab: Cluster) -> None:
    _kubectl(lab, "rollout", "status", _DEPLOYMENT, "--timeout=60s")


def _kubectl(lab: Cluster, *arguments: str, check: bool = True) -> None:
    lab.kubectl("-n", places.NAMESPACE, *arguments, check=check, timeout=70)


def _iptables(control_plane: str, how: str) -> None:
    tools.docker("exec", control_plane, "iptables", how, *_RULE)


def _is_cut_off(control_plane: str) -> bool:
    argv = [tools.find("docker"), "exec", control_plane, "iptables", "-C", *_RULE]
    return tools.run(argv, check=False).returncode == 0

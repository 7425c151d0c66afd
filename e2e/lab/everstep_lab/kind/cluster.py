"""Creates and deletes the kind cluster, and writes a kubeconfig with the administrator's token."""

import base64
import json
import os
import shutil
import sysconfig
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from everstep_lab import kubeconfig
from everstep_lab.config import LabConfig
from everstep_lab.kind import manifests, nodes, places, tools
from everstep_lab.kind.archive import Archive

TOKEN_HOURS = 240
DELETE_SECONDS = 600.0
"""Deleting containers with the mounts of a few hundred pods took over 180 s on a busy disk."""


def own_kubeconfig(where: places.KindPlaces) -> Path:
    """The kubeconfig that kind writes. It holds a client certificate; the lab's holds a token."""
    return where.root / "kind.kubeconfig"


def create(
    where: places.KindPlaces,
    config: LabConfig,
    store_port: int,
    archives: Sequence[Archive],
    say: Callable[[str], None],
) -> None:
    """Create the cluster. The archives are written while the nodes start. Raises LabError."""
    document = manifests.build_cluster(
        nodes=config.nodes, grace_seconds=config.node_grace_seconds,
        packages=sysconfig.get_path("purelib"), store_port=store_port,
    )  # fmt: skip
    say(f"creating the kind cluster {where.cluster!r}: 1 + {config.nodes} nodes")
    image = os.environ.get("KIND_NODE_IMAGE")
    argv = [
        tools.find("kind"), "create", "cluster", "--name", where.cluster,
        "--config", "-", "--kubeconfig", str(own_kubeconfig(where)),
        *(["--image", image] if image else []),
    ]  # fmt: skip
    for archive in archives:
        archive.start()
    tools.run(argv, stdin=json.dumps(document), timeout=600)
    say("loading the images into the nodes")
    for archive in archives:
        archive.load(where.cluster)


def write_kubeconfig(
    where: places.KindPlaces, kubectl: Sequence[Any], files: Collection[str]
) -> None:
    """Write a kubeconfig with the administrator's token, in the same form as the local lab's."""
    view = json.loads(tools.run([*kubectl, "config", "view", "--raw", "--output", "json"]).stdout)
    found = view["clusters"][0]["cluster"]
    ca = base64.b64decode(found["certificate-authority-data"])
    argv = [
        "-n", places.NAMESPACE, "create", "token", manifests.ADMIN, f"--duration={TOKEN_HOURS}h",
    ]  # fmt: skip
    token = tools.run([*kubectl, *argv]).stdout.strip()
    document = kubeconfig.build(found["server"], ca, token, "admin", where.cluster)
    where.ca.write_bytes(ca)
    for path in files:
        kubeconfig.write_private(Path(path), document)


def delete(where: places.KindPlaces, extra: str) -> None:
    """Delete the cluster and the lab's files.

    `extra` is an additional kubeconfig, or empty. It is deleted if a lab wrote it.
    """
    argv = [
        tools.find("kind"), "delete", "cluster", "--name", where.cluster,
        "--kubeconfig", str(own_kubeconfig(where)),
    ]  # fmt: skip
    for node in tools.list_containers(where.cluster):
        if nodes.state(node) == "paused":  # docker cannot remove a paused container
            tools.docker("unpause", node)
    tools.run(argv, timeout=DELETE_SECONDS)
    if extra and kubeconfig.is_ours(Path(extra)):
        Path(extra).unlink()
    shutil.rmtree(where.root, ignore_errors=True)

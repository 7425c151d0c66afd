"""Turns a container's spec into a command on this machine, with files, paths and environment."""

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep_lab.node import environment
from everstep_lab.node.container import Command
from everstep_lab.node.errors import NotSimulatedError
from everstep_lab.node.images import Image
from everstep_lab.node.rewrite import Paths

TERMINATION_LOG = "/dev/termination-log"
MESSAGE_LIMIT = 4096
"""Maximum bytes of a termination message, as in the kubelet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What is needed for one run of a container."""

    container: Mapping[str, Any]
    image: Image
    env: Mapping[str, str]
    """The environment as in the pod's spec. Its mount paths are not yet replaced."""
    hostname: str
    gpus: Sequence[str]
    mounts: Mapping[str, str]
    folder: Path
    """The folder of this run. It holds the image's copy, the log and the termination message."""
    marks: Mapping[str, str]


def apply_order(order: Order) -> Command:
    """Create the container's files and return its command.

    Raises `NotSimulatedError` if the spec has neither command nor args.
    """
    spec = order.container
    argv = [*(spec.get("command") or []), *(spec.get("args") or [])]
    if not argv:
        raise NotSimulatedError(
            f'container "{spec["name"]}" has neither command nor args: set one; images of the lab have no '
            "entry point"
        )
    message = spec.get("terminationMessagePath") or TERMINATION_LOG
    paths = Paths({**order.mounts, message: os.fspath(_message_file(order.folder))})
    root = order.folder / "root"
    _make_root(order.image, root)
    env = {name: paths.rewrite(value) for name, value in order.env.items()}
    return Command(
        argv=[paths.rewrite(environment.expand(word, order.env)) for word in argv],
        env={**_base_env(order, root), **env, **order.marks},
        cwd=os.fspath(_working_dir(spec.get("workingDir") or "", paths, root)),
        log=order.folder / "log",
    )


def read_message(folder: Path) -> str:
    """The last 4096 bytes of the termination message."""
    try:
        raw = _message_file(folder).read_bytes()
    except OSError:
        return ""
    return raw[-MESSAGE_LIMIT:].decode(errors="replace")


def _message_file(folder: Path) -> Path:
    return folder / "termination-log"


def _make_root(image: Image, root: Path) -> None:
    """Make a fresh copy of the image's folder, as in a new container. The files are small."""
    shutil.rmtree(root, ignore_errors=True)
    if image.folder is None:
        root.mkdir(parents=True)
    else:
        shutil.copytree(image.folder, root, ignore=shutil.ignore_patterns("__pycache__"))


def _working_dir(wanted: str, paths: Paths, root: Path) -> Path:
    """The working directory: a folder in a volume or in `root`.

    An absolute path outside all volumes becomes `root`, the copy of the image's folder.
    """
    rewritten = paths.rewrite(wanted)
    if rewritten == wanted:
        rewritten = "" if wanted.startswith("/") else wanted
    folder = Path(root, rewritten)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _base_env(order: Order, root: Path) -> dict[str, str]:
    """The variables that image and node set. CUDA is disabled: the GPUs exist only as names."""
    return {
        "PATH": _make_path(order.image, order.folder / "tools"),
        "HOME": os.fspath(root),
        "HOSTNAME": order.hostname,
        "LANG": "C.UTF-8",
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "",
        "NVIDIA_VISIBLE_DEVICES": ",".join(order.gpus) or "void",
    }


def _make_path(image: Image, tools: Path) -> str:
    """A container's PATH: the image's scripts, its `python` and `python3`, this machine's PATH."""
    tools.mkdir(parents=True, exist_ok=True)
    for name in ("python", "python3"):
        link = tools / name
        if not link.is_symlink():
            link.symlink_to(image.python)
    first = [] if image.bin is None else [os.fspath(image.bin)]
    return ":".join([*first, os.fspath(tools), "/usr/local/bin", "/usr/bin", "/bin"])

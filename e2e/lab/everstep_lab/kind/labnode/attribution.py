"""Asks the kubelet which pod holds a GPU, and finds in /proc which process uses it."""

import asyncio
import contextlib
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import grpc  # type: ignore[import-untyped]

from everstep_lab.exporter.render import Holder
from everstep_lab.kind.labnode import wire
from everstep_lab.node.devices import RESOURCE
from everstep_lab.node.holders import Candidate, choose_holder

VISIBLE = "NVIDIA_VISIBLE_DEVICES"
_EVERY = 1.0
_LIMIT = 16 << 20

log = logging.getLogger("labnode.attribution")


class PodResources:
    """Asks the kubelet once a second, as dcgm-exporter does. `holders` is its last answer."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self.holders: Mapping[str, Holder] = {}

    async def run(self) -> None:
        """Ask the kubelet until cancelled. While it does not answer, keep its last answer."""
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await self._follow()
            await asyncio.sleep(_EVERY)

    async def _follow(self) -> None:
        options = [("grpc.max_receive_message_length", _LIMIT)]
        async with grpc.aio.insecure_channel(f"unix://{self._socket}", options=options) as channel:
            ask = channel.unary_unary(wire.LIST_POD_RESOURCES)
            while True:
                self.holders = build_holders(
                    wire.read_pod_resources(await ask(wire.EMPTY, timeout=5))
                )
                await asyncio.sleep(_EVERY)


def build_holders(held: Iterable[wire.Held]) -> dict[str, Holder]:
    return {
        uuid: Holder(container=one.container, namespace=one.namespace, pod=one.pod)
        for one in held
        if one.resource == RESOURCE
        for uuid in one.devices
    }


def find_holder(uuid: str, processes: Sequence[Candidate]) -> Candidate | None:
    """The process that uses this GPU, identified by the list of devices in its environment."""
    inside = [one for one in processes if uuid in one.env.get(VISIBLE, "").split(",")]
    if not inside:
        return None
    devices = inside[0].env[VISIBLE].split(",")
    return choose_holder(
        _choose_main(inside).pid, inside, position=devices.index(uuid), gpus=len(devices)
    )


def _choose_main(inside: Sequence[Candidate]) -> Candidate:
    """The container's main process: the oldest whose parent is outside the container.

    The parent of an exec probe's process is outside, too, but that process is younger.
    """
    pids = {one.pid for one in inside}
    outermost = [one for one in inside if one.parent not in pids]
    return max(outermost or inside, key=lambda one: one.age)


def list_processes(proc: Path = Path("/proc")) -> list[Candidate]:
    """Every process of the node. Needs its PID namespace and the right to read environments."""
    uptime = float((proc / "uptime").read_text().split()[0])
    found = []
    for entry in os.listdir(proc):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                found.append(_read(proc / entry, uptime))
    return found


def _read(folder: Path, uptime: float) -> Candidate:
    fields = (folder / "stat").read_text().rpartition(")")[2].split()
    raw = (folder / "environ").read_bytes().split(b"\0")
    env = dict(one.decode(errors="replace").partition("=")[::2] for one in raw if one)
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return Candidate(pid=int(folder.name), parent=int(fields[1]), age=uptime - started, env=env)

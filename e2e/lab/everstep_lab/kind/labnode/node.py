"""One node of the kind lab: its simulated GPUs, connected to kubelet, exporter and faults."""

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from everstep_lab.exporter.server import PORT, ExporterServer
from everstep_lab.kind.labnode import attribution, wire
from everstep_lab.kind.labnode.attribution import PodResources
from everstep_lab.kind.labnode.memory import Begun, State, load_state, put_state
from everstep_lab.kind.labnode.plugin import DevicePlugin
from everstep_lab.node.faults import Gpus
from everstep_lab.node.holders import Candidate
from everstep_lab.node.requests import EXPORTER_EFFECTS, EXPORTER_MODES, check_request
from everstep_lab.scenario import build_course
from everstep_lab.seam import BadRequestError, FaultRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    node: str
    gpus: int
    seed: int
    state: Path
    """A folder on the node's disk."""
    kubelet: Path
    """The kubelet's folder on the node, /var/lib/kubelet."""
    python_tree: str
    """Folder of the node, mounted at the same path in containers with a GPU; empty for none."""
    boot: str
    """The machine's boot id."""

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> "Settings":
        return cls(
            node=environ["NODE_NAME"], gpus=int(environ["LAB_GPUS"]), seed=int(environ["LAB_SEED"]),
            state=Path(environ["LAB_STATE"]), kubelet=Path("/var/lib/kubelet"),
            python_tree=environ.get("LAB_PYTHON_TREE", ""),
            boot=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        )  # fmt: skip


class LabNode:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._file = settings.state / "state.json"
        self._state = load_state(self._file, settings.boot)
        self._chance = random.Random(f"{settings.seed}/{settings.node}/{len(self._state.faults)}")
        self._gpus = Gpus(seed=settings.seed, node=settings.node, count=settings.gpus, stage=self)
        tree = settings.python_tree
        self._plugin = DevicePlugin(
            settings.kubelet / "device-plugins", gpus=lambda: self._gpus.all,
            mounts=[wire.Mount(container_path=tree, host_path=tree)] if tree else [],
        )  # fmt: skip
        self._pods = PodResources(settings.kubelet / "pod-resources" / "kubelet.sock")
        self._exporter = ExporterServer(
            settings.node, gpus=lambda: self._gpus.all, holders=lambda: self._pods.holders,
            clock=time.monotonic,
        )  # fmt: skip
        self._told: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Run until cancelled. If one part fails, all end."""
        self._take_up()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._pods.run())
                tasks.create_task(self._exporter.run("0.0.0.0", PORT))
                tasks.create_task(self._plugin.run())
        finally:
            await self._gpus.stop()

    def _take_up(self) -> None:
        """Continue the faults that the previous lab-node container had."""
        for gpu in self._state.base[: len(self._gpus.all)]:
            self._gpus.all[gpu.index] = gpu
        for fault in self._state.faults:
            self._play(fault)
        self._exporter.mode = self._state.exporter

    def _play(self, fault: Begun) -> str:
        course = build_course(fault.code, random.Random(fault.seed))
        self._gpus.play(fault.gpu, fault.code, course, fault.at)
        return self._gpus.titles[-1]

    # --- what `faults` acts on (faults.Stage) ---------------------------------------------------

    def gpus_changed(self) -> None:
        task = asyncio.create_task(self._plugin.changed())
        self._told.add(task)
        task.add_done_callback(self._told.discard)

    async def set_exporter(self, mode: str) -> None:
        await self._exporter.set_mode(mode)

    def find_holder(self, uuid: str) -> Candidate | None:
        return attribution.find_holder(uuid, attribution.list_processes())

    # --- faults ---------------------------------------------------------------------------------

    async def fault(self, request: FaultRequest) -> str:
        """Inject a fault. Raises BadRequestError, which names the value and the possible ones."""
        check_request(self._settings.node, self._settings.gpus, request)
        said = []
        if request.xid is not None:
            said.append(self._begin(request.gpu or 0, request.xid))
        if request.exporter is not None:
            mode = EXPORTER_MODES[request.exporter]
            self._keep(replace(self._state, exporter=mode))
            await self.set_exporter(mode)
            said.append(EXPORTER_EFFECTS[mode])
        return f"{self._settings.node}: " + "; ".join(said)

    def _begin(self, gpu: int, code: int) -> str:
        fault = Begun(gpu=gpu, code=code, seed=self._chance.getrandbits(32), at=time.monotonic())
        try:
            title = self._play(fault)
        except ValueError as error:
            raise BadRequestError(str(error)) from None
        self._keep(replace(self._state, faults=(*self._state.faults, fault)))
        return title

    async def heal(self) -> str:
        """Heal GPUs and exporter. Reloading the driver ends every process that uses a GPU."""
        said = []
        if self._gpus.titles:
            ended = self._end_holders()
            await self._gpus.reload()
            self._exporter.restart()
            said.append("driver reloaded" + (f", {ended} processes ended" if ended else ""))
        if self._exporter.mode != "ok" or said:
            await self.set_exporter("ok")
            said.append("exporter answers")
        self._keep(State(boot=self._settings.boot, base=tuple(self._gpus.all)))
        if left := [f"GPU {gpu.index}" for gpu in self._gpus.all if gpu.remap_failure]:
            said.append(f"{', '.join(left)} still shows its failed remap, as a real board would")
        return f"{self._settings.node}: " + ("; ".join(said) or "nothing to heal")

    def _end_holders(self) -> int:
        known = {gpu.uuid for gpu in self._gpus.all}
        ended = 0
        for process in attribution.list_processes():
            if known & set(process.env.get(attribution.VISIBLE, "").split(",")):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
                    ended += 1
        return ended

    def _keep(self, state: State) -> None:
        self._state = state
        put_state(self._file, state)

    # --- state ----------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        return self._plugin.registered.is_set()

    def describe(self) -> dict[str, Any]:
        holders = self._pods.holders
        return {
            "exporter": self._exporter.mode,
            "registered": self.ready,
            "faults": list(self._gpus.titles),
            "gpus": [
                {
                    "index": gpu.index, "uuid": gpu.uuid, "present": gpu.present,
                    "healthy": gpu.device_healthy, "xid": gpu.xid,
                    "pod": holders[gpu.uuid].pod if gpu.uuid in holders else None,
                }
                for gpu in self._gpus.all
            ],
        }  # fmt: skip

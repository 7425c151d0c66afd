"""One simulated node: a kubelet whose pods are local processes, GPUs, and a dcgm-exporter."""

import asyncio
import time
import uuid
from datetime import datetime

from everstep_lab.exporter.server import ExporterServer
from everstep_lab.node import objects
from everstep_lab.node.clock import utc_now
from everstep_lab.node.faults import Gpus
from everstep_lab.node.holders import Candidate
from everstep_lab.node.kubelet import Kubelet
from everstep_lab.node.kubelet_port import KubeletPort
from everstep_lab.node.requests import EXPORTER_EFFECTS, EXPORTER_MODES, check_request
from everstep_lab.scenario import Scenario
from everstep_lab.seam import BadRequestError, Cluster, FaultRequest, NodeSpec

Object = objects.Object


class SimulatedNode:
    """Implements `seam.Node`. Create and run it in the main thread."""

    def __init__(self, spec: NodeSpec, cluster: Cluster, scenario: Scenario) -> None:
        self.spec = spec
        self._scenario = scenario
        self._boot_id = str(uuid.uuid4())
        self._ready_since = utc_now()
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._gpus = Gpus(seed=cluster.seed, node=spec.name, count=spec.gpus, stage=self)
        self._kubelet = Kubelet(
            spec, cluster, gpus=lambda: self._gpus.all, node_status=self._status, failed=self._fail
        )
        self._link = self._kubelet.link
        self._exporter = ExporterServer(
            spec.name, gpus=lambda: self._gpus.all, holders=self._kubelet.holders,
            clock=time.monotonic,
        )  # fmt: skip
        self._exporter_task: asyncio.Task[None] | None = None
        certificate, key = (cluster.certs / f"{spec.name}.{end}" for end in ("crt", "key"))
        self._port = KubeletPort(self._kubelet.find, certificate, key)

    async def run(self) -> None:
        await self._open_ports()
        self._link.connect()
        await asyncio.shield(self._broken)

    async def stop(self) -> None:
        await self._link.disconnect()
        await self._gpus.stop()
        await self._kubelet.stop()
        await self._close_ports()
        if not self._broken.done():
            self._broken.set_result(None)

    def _fail(self, error: BaseException) -> None:
        if not self._broken.done():
            self._broken.set_exception(error)

    async def _open_ports(self) -> None:
        await self._port.open(self.spec.ip)
        host = objects.exporter_ip(self.spec)
        self._exporter_task = asyncio.create_task(self._exporter.run(host))
        self._exporter_task.add_done_callback(self._exporter_done)

    def _exporter_done(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()):
            self._fail(error)

    async def _close_ports(self) -> None:
        await self._port.close()
        task, self._exporter_task = self._exporter_task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    # --- what `faults` acts on (faults.Stage) ---------------------------------------------------

    def gpus_changed(self) -> None:
        self._link.node_changed()

    async def set_exporter(self, mode: str) -> None:
        await self._exporter.set_mode(mode)

    def find_holder(self, gpu: str) -> Candidate | None:
        return self._kubelet.find_holder(gpu)

    # --- faults ---------------------------------------------------------------------------------

    async def fault(self, request: FaultRequest) -> str:
        check_request(self.spec.name, self.spec.gpus, request)
        if not self._powered:
            raise BadRequestError(
                f"{self.spec.name} has no power: boot it with `everstep-lab heal {self.spec.name}`"
            )
        if request.freeze_node:
            raise BadRequestError(
                "a simulated node cannot be frozen: use a node of a lab made with `up --kind`"
            )
        said = []
        if request.xid is not None:
            said.append(self._play(request.gpu or 0, request.xid))
        if request.exporter is not None:
            mode = EXPORTER_MODES[request.exporter]
            await self.set_exporter(mode)
            said.append(EXPORTER_EFFECTS[mode])
        if request.partition:
            await self._link.disconnect()
            said.append("cut off from the API server; its processes continue")
        if request.kill_node:
            count = await self._lose_power()
            said.append(f"lost power, {count} processes ended")
        return f"{self.spec.name}: " + "; ".join(said)

    def _play(self, index: int, code: int) -> str:
        try:
            course = self._scenario.plan_xid(code)
        except ValueError as error:
            raise BadRequestError(str(error)) from None
        self._gpus.play(index, code, course)
        return self._gpus.titles[-1]

    @property
    def _powered(self) -> bool:
        return self._kubelet.powered.is_set()

    async def _lose_power(self) -> int:
        """Stop heartbeats, processes, exporter and kubelet port.

        The connection is closed first, because a node without power does not report how its
        containers ended.
        """
        await self._link.disconnect()
        count = await self._kubelet.lose_power()
        await self._gpus.stop()
        await self._close_ports()
        return count

    async def heal(self) -> str:
        """Heal the node. A GPU fault needs a reboot, which ends the node's processes."""
        said = []
        if not self._powered or self._gpus.titles:
            said.append(await self._reboot())
        if self._exporter.mode != "ok":
            await self.set_exporter("ok")
            said.append("exporter answers again")
        if not self._link.connected:
            self._ready_since = utc_now()
            self._link.connect()
            said.append("reaches the API server again")
        left = [f"GPU {gpu.index}" for gpu in self._gpus.all if gpu.remap_failure]
        if left:
            said.append(f"{', '.join(left)} still shows its failed remap, as a real board would")
        return f"{self.spec.name}: " + ("; ".join(said) or "nothing to heal")

    async def _reboot(self) -> str:
        count = await self._lose_power() if self._powered else 0
        self._boot_id = str(uuid.uuid4())
        await self._gpus.reload()
        self._exporter.restart()
        await self._open_ports()
        self._kubelet.regain_power()
        return "rebooted" + (f", {count} processes ended" if count else "")

    # --- state ----------------------------------------------------------------------------------

    def _status(self, now: datetime) -> Object:
        return objects.build_node_status(
            self.spec, self._gpus.all, boot_id=self._boot_id, ready_since=self._ready_since, now=now
        )

    def describe(self) -> dict[str, object]:
        holders = self._kubelet.holders()
        return {
            "ip": self.spec.ip,
            "powered": self._powered,
            "connected": self._link.connected,
            "exporter": self._exporter.mode,
            "faults": list(self._gpus.titles),
            "gpus": [
                {
                    "index": gpu.index, "uuid": gpu.uuid, "present": gpu.present,
                    "healthy": gpu.device_healthy, "xid": gpu.xid,
                    "pod": holders[gpu.uuid].pod if gpu.uuid in holders else None,
                }
                for gpu in self._gpus.all
            ],
            "pods": [
                {"name": f"{pod.namespace}/{pod.name}", "ip": pod.ip, "running": not pod.over}
                for pod in self._kubelet.pods
            ],
        }  # fmt: skip

"""The simulated kubelet: starts and ends a `pod.Pod` for each pod that is bound to its node."""

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine, Sequence
from datetime import datetime
from typing import Any

from everstep_lab import procs
from everstep_lab.exporter.gpu import Gpu
from everstep_lab.exporter.render import Holder
from everstep_lab.node import objects
from everstep_lab.node.backoff import BackoffRule
from everstep_lab.node.clock import utc_now
from everstep_lab.node.container import kill_all
from everstep_lab.node.devices import choose_devices
from everstep_lab.node.environment import Place
from everstep_lab.node.exporterpod import ExporterPod
from everstep_lab.node.holders import Candidate, choose_holder, list_candidates
from everstep_lab.node.link import Link
from everstep_lab.node.pod import Pod
from everstep_lab.node.volumes import Folders, delete_folders
from everstep_lab.seam import Cluster, NodeSpec

Object = dict[str, Any]
FINISHED = ("Succeeded", "Failed")
_FIRST_IP, _IPS = 10, 245
log = logging.getLogger(__name__)


class Kubelet:
    """Use it from the main thread: a pod's processes die with the thread that started them."""

    def __init__(
        self,
        spec: NodeSpec,
        cluster: Cluster,
        *,
        gpus: Callable[[], Sequence[Gpu]],
        node_status: Callable[[datetime], Object],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._spec = spec
        self._gpus = gpus
        self.place = Place(node=spec.name, host_ip=spec.ip, pod_ip="")
        self.images = cluster.images
        self.mark = os.environ.get(procs.MARK, os.fspath(cluster.state))
        self.backoff = BackoffRule()
        self.powered = asyncio.Event()
        self.powered.set()
        self.synced = asyncio.Event()
        """Set when the API server has listed the node's pods."""
        self._folders = Folders(disk=cluster.state / spec.name, memory=cluster.memory / spec.name)
        self._pods: dict[str, Pod] = {}
        self._exporters: dict[str, ExporterPod] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._errands: set[asyncio.Task[None]] = set()
        self._held: dict[str, tuple[str, Holder]] = {}
        self._next_ip = 0
        self.link = Link(
            spec, cluster, node_status=node_status,
            pods=lambda: [*self._pods.values(), *self._exporters.values()],
            seen=self._seen, failed=failed,
        )  # fmt: skip
        for folder in (self._folders.disk, self._folders.memory):
            folder.mkdir(parents=True, exist_ok=True)

    @property
    def pods(self) -> Sequence[Pod]:
        return list(self._pods.values())

    def find(self, namespace: str, name: str) -> Pod | None:
        """Find a pod by name. If two pods have this name, return the newer one."""
        found = [p for p in self._pods.values() if (p.namespace, p.name) == (namespace, name)]
        return found[-1] if found else None

    async def stop(self) -> None:
        """Send SIGKILL to everything, wait until each pod has ended, remove the folders."""
        self.powered.set()
        while pending := [task for task in self._tasks.values() if not task.done()]:
            for pod in self._pods.values():
                pod.kill()
            await asyncio.wait(pending, timeout=0.1)
        for errand in self._errands:
            errand.cancel()
        await asyncio.gather(*self._errands, return_exceptions=True)
        delete_folders(self._folders)

    async def lose_power(self) -> int:
        """Send SIGKILL to every process of every pod. Returns their number."""
        self.powered.clear()
        killed: set[int] = set()
        while alive := [pid for pod in self._pods.values() for pid in pod.processes()]:
            kill_all(alive)
            killed |= set(alive)
            await asyncio.sleep(0.01)
        return len(killed)

    def regain_power(self) -> None:
        """Empty the volumes in memory. Restart the pods that the API server still lists."""
        for pod in self._pods.values():
            pod.lose_memory()
        self.synced.clear()
        self._run(self._power_on_when_synced())

    async def _power_on_when_synced(self) -> None:
        await self.synced.wait()
        self.powered.set()

    # --- events of the pod watch ----------------------------------------------------------------

    def _seen(self, event: str, document: Object) -> None:
        if event == "LISTED":
            listed = {pod["metadata"]["uid"]: pod for pod in document.get("items") or []}
            for pod in listed.values():
                self._wanted(pod)
            for gone in [pod for uid, pod in self._pods.items() if uid not in listed]:
                self._vanished(gone, gone.document)
            self._exporters = {u: pod for u, pod in self._exporters.items() if u in listed}
            self.synced.set()
        elif event == "DELETED":
            self._exporters.pop(document["metadata"]["uid"], None)
            known = self._pods.get(document["metadata"]["uid"])
            if known is not None:
                self._vanished(known, document)
        else:
            self._wanted(document)

    def _wanted(self, document: Object) -> None:
        meta = document["metadata"]
        if objects.is_exporter(document):
            self._wanted_exporter(document)
            return
        deleted = bool(meta.get("deletionTimestamp"))
        known = self._pods.get(meta["uid"])
        if known is not None:
            known.update(document)
            if deleted and not known.stopped:
                self.event(document, "Normal", "Killing", "Stopping the pod's containers")
                self._run(self._end(known, max(1, meta.get("deletionGracePeriodSeconds") or 0)))
            elif deleted and known.over:
                self.changed(known)
        elif deleted:
            self._run(self.link.delete(document))
        elif (document.get("status") or {}).get("phase") not in FINISHED:
            self._begin(document)

    def _wanted_exporter(self, document: Object) -> None:
        uid = document["metadata"]["uid"]
        if document["metadata"].get("deletionTimestamp"):
            self._exporters.pop(uid, None)
            self._run(self.link.delete(document))
        elif uid not in self._exporters:
            self._exporters[uid] = ExporterPod(self._spec, document, utc_now())
            self.link.pod_changed(uid)

    def _begin(self, document: Object) -> None:
        uid = document["metadata"]["uid"]
        folders = Folders(disk=self._folders.disk / uid, memory=self._folders.memory / uid)
        pod = Pod(document, self, folders, self._take_ip())
        self._pods[uid] = pod
        self._tasks[uid] = asyncio.create_task(self._run_pod(pod), name=f"pod {pod.name}")

    async def _run_pod(self, pod: Pod) -> None:
        try:
            await pod.run()
        except Exception as error:  # an error in one pod must not end the node
            log.exception("%s: pod %s/%s", self._spec.name, pod.namespace, pod.name)
            pod.fail("LabError", f"the lab could not run this pod: {error!r}")
        finally:
            self._held = {gpu: held for gpu, held in self._held.items() if held[0] != pod.uid}
            self.changed(pod)

    async def _end(self, pod: Pod, grace: float) -> None:
        """End a pod: send SIGTERM, and after `grace` seconds SIGKILL."""
        task = self._tasks[pod.uid]
        pod.terminate()
        await asyncio.wait({task}, timeout=grace)
        while not task.done():
            pod.kill()
            await asyncio.wait({task}, timeout=0.2)
        self.changed(pod)

    def _vanished(self, pod: Pod, document: Object) -> None:
        """End a pod whose object no longer exists.

        Its processes get the grace period of the deletion, at least 1 s.
        """
        grace = document["metadata"].get("deletionGracePeriodSeconds")
        if grace is None:
            grace = document["spec"].get("terminationGracePeriodSeconds", 30)
        self._run(self._forget(pod, max(1, grace)))

    async def _forget(self, pod: Pod, grace: float) -> None:
        if pod.uid not in self._pods:
            return
        await self._end(pod, grace)
        self._pods.pop(pod.uid, None)
        self._tasks.pop(pod.uid, None)
        await asyncio.to_thread(delete_folders, pod.folders)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._errands.add(task)
        task.add_done_callback(self._errand_done)

    def _errand_done(self, task: "asyncio.Task[None]") -> None:
        self._errands.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.error("%s: %r", self._spec.name, error)

    def _take_ip(self) -> str:
        """The next free address. An address that was just released is not reused immediately."""
        used = {pod.ip for pod in self._pods.values()}
        while True:
            number = _FIRST_IP + self._next_ip % _IPS
            self._next_ip += 1
            if (ip := f"{self._spec.pod_prefix}{number}") not in used or len(used) >= _IPS:
                return ip

    # --- what pods need from their node (pod.Host) ----------------------------------------------

    async def fetch(self, kind: str, namespace: str, name: str) -> Object | None:
        return await self.link.fetch(kind, namespace, name)

    def changed(self, pod: Pod) -> None:
        self.link.pod_changed(pod.uid)

    def event(self, pod: Object, kind: str, reason: str, message: str) -> None:
        self.link.event(pod, kind, reason, message)

    def allocate(self, pod: Pod, container: str, count: int) -> Sequence[str] | None:
        chosen = choose_devices(self._gpus(), self._held, count)
        for gpu in chosen or ():
            who = Holder(container=container, namespace=pod.namespace, pod=pod.name)
            self._held[gpu] = (pod.uid, who)
        return chosen

    # --- which process holds which GPU ----------------------------------------------------------

    def holders(self) -> dict[str, Holder]:
        return {gpu: who for gpu, (_, who) in self._held.items()}

    def find_holder(self, gpu: str) -> Candidate | None:
        """The process that uses this GPU now."""
        uid, who = self._held.get(gpu, ("", None))
        pod = self._pods.get(uid)
        held = pod.by_name.get(who.container) if pod and who else None
        if held is None or held.process is None:
            return None
        return choose_holder(
            held.process.pid, list_candidates(held.process.shim),
            position=list(held.gpus).index(gpu), gpus=len(held.gpus),
        )  # fmt: skip

"""Simulated kubelets of all nodes: they report bound pods as running and post heartbeats."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial

from everstep_contract import names
from everstep_lab.api import STRATEGIC, Api
from everstep_scale import objects
from everstep_scale.calling import Caller
from everstep_scale.objects import Object

HEARTBEAT_SECONDS = 300.0
"""Seconds between posts of an unchanged node status (the kubelet's default)."""


@dataclass(slots=True)
class Kubelets:
    api: Api
    place: Callable[[Object], str]
    """Returns the address for a newly bound pod."""
    started: Callable[[Object, str], Awaitable[None]]
    """Called when the pod's status is Running."""
    caller: Caller = field(default_factory=Caller)
    _taken: set[str] = field(default_factory=set)

    async def run(self) -> None:
        """Set the status of every bound pod, until cancelled."""
        async with asyncio.TaskGroup() as group:
            async for event in self.api.follow("/api/v1/pods"):
                found = event.object.get("items") or ()
                for pod in found if event.type == "LISTED" else [event.object]:
                    if self._is_new(pod):
                        group.create_task(self._start(pod))

    def _is_new(self, pod: Object) -> bool:
        uid = pod["metadata"]["uid"]
        pending = (pod.get("status") or {}).get("phase", "Pending") == "Pending"
        if not pod["spec"].get("nodeName") or not pending or uid in self._taken:
            return False
        self._taken.add(uid)
        return True

    async def _start(self, pod: Object) -> None:
        address = self.place(pod)
        containers = [c["name"] for c in pod["spec"]["containers"]]
        metadata = pod["metadata"]
        path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}/status"
        status = objects.build_running(address, stamp(), containers)
        call = partial(self.api.patch, path, {"status": status}, kind=STRATEGIC)
        await self.caller.persist(call)
        await self.started(pod, address)

    async def beat(self, nodes: int) -> None:
        """Post a heartbeat for every node once in HEARTBEAT_SECONDS, evenly spread, until cancelled."""
        number, due = 0, time.monotonic()
        while True:
            condition = {"type": "Ready", "lastHeartbeatTime": stamp()}
            path = f"/api/v1/nodes/{objects.node_name(number)}/status"
            body = {"status": {"conditions": [condition]}}
            await self.caller.persist(partial(self.api.patch, path, body, kind=STRATEGIC))
            number = (number + 1) % nodes
            due += HEARTBEAT_SECONDS / nodes
            await asyncio.sleep(max(0.0, due - time.monotonic()))


def job_of(pod: Object) -> str:
    return str((pod["metadata"].get("labels") or {}).get(names.LABEL_JOB, ""))


def stamp() -> str:
    now = datetime.now(UTC)  # noqa: TID251 what a kubelet writes
    return now.strftime("%Y-%m-%dT%H:%M:%SZ")

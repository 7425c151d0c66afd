"""The state of one job and its cluster, as `kubectl` would show it."""

from dataclasses import dataclass
from typing import Any

from everstep_contract import names
from everstep_lab.api import Api, ApiError

Object = dict[str, Any]
API = f"/apis/{names.GROUP}/{names.VERSION}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    name: str
    slot: int
    attempt: int
    node: str
    phase: str
    deleting: bool
    restarts: int
    """How often the kubelet has restarted its containers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    name: str
    ready: bool
    cordoned: bool
    """Whether it is unschedulable and has the operator's taint."""


class Board:
    """Reads and writes one namespace with administrator rights."""

    def __init__(self, api: Api, namespace: str = "default") -> None:
        self._api = api
        self._namespace = namespace
        self._jobs = f"{API}/namespaces/{namespace}/{names.PLURAL}"
        self._core = f"/api/v1/namespaces/{namespace}"

    async def create(self, job: Object) -> Object:
        return await self._api.create(self._jobs, job)

    async def delete(self, job: str) -> None:
        await self._api.delete(f"{self._jobs}/{job}")

    async def job(self, job: str) -> Object:
        """The job. Raises `ApiError` 404 if it does not exist."""
        return await self._api.get(f"{self._jobs}/{job}")

    async def exists(self, job: str) -> bool:
        try:
            await self.job(job)
        except ApiError as error:
            if error.status == 404:
                return False
            raise
        return True

    async def patch(self, job: str, change: Object) -> None:
        await self._api.patch(f"{self._jobs}/{job}", change)

    async def pods(self, job: str) -> list[Pod]:
        selector = f"{names.LABEL_JOB}={job}"
        found = await self._api.list(f"{self._core}/pods", labelSelector=selector)
        return sorted(map(_pod, found), key=lambda p: (p.slot, p.attempt))

    async def current_pod(self, job: str, slot: int) -> Pod | None:
        """The slot's newest attempt."""
        pods = [p for p in await self.pods(job) if p.slot == slot]
        return pods[-1] if pods else None

    async def delete_pod(self, name: str) -> None:
        await self._api.delete(f"{self._core}/pods/{name}")

    async def logs(self, pod: str, **params: str) -> str:
        """The pod's log; empty if it cannot be read, for example because there is none yet."""
        try:
            return await self._api.text(f"{self._core}/pods/{pod}/log", **params)
        except ApiError:
            return ""

    async def nodes(self) -> dict[str, Node]:
        return {n["metadata"]["name"]: _node(n) for n in await self._api.list("/api/v1/nodes")}

    async def quarantines(self) -> list[Object]:
        return await self._api.list(f"{API}/{names.QUARANTINE_PLURAL}")

    async def release(self, quarantine: str) -> None:
        await self._api.delete(f"{API}/{names.QUARANTINE_PLURAL}/{quarantine}")

    async def events(self, job: str) -> list[Object]:
        selector = f"involvedObject.name={job}"
        return await self._api.list(f"{self._core}/events", fieldSelector=selector)


def condition(job: Object, kind: str) -> Object | None:
    """The condition of that type, if the job has it."""
    conditions = job.get("status", {}).get("conditions", [])
    return next((c for c in conditions if c["type"] == kind), None)


def is_true(job: Object, kind: str) -> bool:
    found = condition(job, kind)
    return found is not None and found["status"] == "True"


def _pod(body: Object) -> Pod:
    labels = body["metadata"].get("labels", {})
    containers = body.get("status", {}).get("containerStatuses", [])
    return Pod(
        name=body["metadata"]["name"],
        slot=int(labels.get(names.LABEL_SLOT, -1)),
        attempt=int(labels.get(names.LABEL_ATTEMPT, -1)),
        node=body["spec"].get("nodeName", ""),
        phase=body.get("status", {}).get("phase", ""),
        deleting="deletionTimestamp" in body["metadata"],
        restarts=sum(int(c.get("restartCount", 0)) for c in containers),
    )


def _node(body: Object) -> Node:
    conditions = body.get("status", {}).get("conditions", [])
    taints = {t["key"] for t in body["spec"].get("taints", [])}
    return Node(
        name=body["metadata"]["name"],
        ready=any(c["type"] == "Ready" and c["status"] == "True" for c in conditions),
        cordoned=bool(body["spec"].get("unschedulable")) and names.TAINT_QUARANTINE in taints,
    )

"""A few nodes of the lab and one job at a time on them, so that several cases go on side by side.

What a user, an administrator and the hardware do comes from here, past the proxy.
"""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from crash.proxy import Call
from crash.shape import Object, Shape, build_shape, mark_of
from everstep_contract import names
from everstep_demo import faults
from everstep_demo.board import Board, is_true
from everstep_lab import Lab
from everstep_lab.api import Api, ApiError, UnreachableError

LABEL = "crash-lane"
LIMIT_SECONDS = 120.0
QUIET_SECONDS = 2.0
_INCIDENT = re.compile(r"NODE-[0-9a-f]{10}\b")
_TOKEN = re.compile(r"JOB-everstep-[0-9a-f]{8}\b")
"""The Secret is named after the job's UID."""
_CORE = "/api/v1/namespaces/default"
_QUARANTINES = f"/apis/{names.GROUP}/{names.VERSION}/{names.QUARANTINE_PLURAL}"


class NotReached(AssertionError):
    """What was awaited did not come."""


def _as_merge(document: Any) -> Object:
    """What a write says of the object; of a JSON patch the fields of the status that it sets as a whole."""
    if not isinstance(document, list):
        return document or {}
    status = {
        operation["path"].removeprefix("/status/"): operation.get("value")
        for operation in document
        if operation["path"].count("/") == 2
    }
    return {"status": status}


class Lane:
    def __init__(self, lab: Lab, api: Api, index: int, nodes: Sequence[str]) -> None:
        self.lab, self.api, self.index = lab, api, index
        self.nodes = frozenset(nodes)
        self.board = Board(api)
        self.job = ""

    async def label(self) -> None:
        """The lane's jobs run on its nodes, by a label."""
        for node in self.nodes:
            change = {"metadata": {"labels": {LABEL: str(self.index)}}}
            await self.api.patch(f"/api/v1/nodes/{node}", change)

    async def until_noted(self) -> None:
        """The operator notes on each node how many GPUs it has, once in the node's life: in no later play."""

        async def noted() -> bool:
            found = [n["metadata"].get("annotations") or {} for n in await self.own_nodes()]
            return all(names.ANNOTATION_EXPECTED_GPUS in annotations for annotations in found)

        await self.until("the GPUs of all nodes noted", noted)

    def concerns(self, call: Call) -> bool:
        """Whether a write is about this lane's job or nodes. Tokens of the operator's are nobody's."""
        subject = f"{call.bare} {call.body.decode(errors='replace')} "
        if self.job and self.job in subject:
            return True
        ends = ('"', "/", ".", " ", "\\", "-")  # "-": a NodeQuarantine is named after its node
        return any(node + end in subject for node in self.nodes for end in ends)

    def title_of(self, call: Call) -> str:
        """What is written, in words that are the same in every run: without this job's name, and without
        what chance chose (the node, the incident, an Event's digest). A status says which state it brings.
        """
        document = _as_merge(call.document)
        words = call.title
        if call.bare.endswith("/events"):
            words = f"POST events {document['reason']} of {document['involvedObject']['name']}"
        if state := (document.get("status") or {}).get("state"):
            words += f" {state}"
        if self.job:
            words = words.replace(self.job, "JOB")
        for node in sorted(self.nodes, key=len, reverse=True):
            words = words.replace(node, "NODE")
        return _TOKEN.sub("JOB-everstep-UID", _INCIDENT.sub("NODE-INCIDENT", words))

    async def create(self, job: Object) -> None:
        self.job = job["metadata"]["name"]
        pod = job["spec"]["workers"]["template"]["spec"]
        pod["nodeSelector"] = {LABEL: str(self.index)}
        await self.board.create(job)

    async def status(self) -> Object:
        found: Object = (await self.board.job(self.job)).get("status", {})
        return found

    async def until(
        self,
        what: str,
        is_so: Callable[[], Awaitable[object]],
        *,
        limit: float = LIMIT_SECONDS,
    ) -> None:
        """Poll until it is so. An API server that is away for a while is no failure of what is awaited.

        Raises:
            NotReached: with what was awaited and how the job stands.
        """
        end = time.monotonic() + limit
        while time.monotonic() < end:
            try:
                if await is_so():
                    return
            except (UnreachableError, ApiError) as error:
                if isinstance(error, ApiError) and error.status < 429:
                    raise
            await asyncio.sleep(0.2)
        raise NotReached(f"waited {limit:.0f} s for: {what}. {await self.explain()}")

    async def explain(self) -> str:
        try:
            shape = await self.shape()
        except (ApiError, UnreachableError) as error:
            return f"the job cannot be read: {error}"
        words = f"{self.job} is: {shape}; {(await self.status()).get('message')}"
        pods = await self.board.pods(self.job)
        return "\n".join([words, *[await self._last_words(pod.name) for pod in pods]])

    async def _last_words(self, pod: str) -> str:
        return f"--- {pod}:\n{await self.board.logs(pod, tailLines='30')}"

    async def until_running(self, *, limit: float = LIMIT_SECONDS, **attempts: int) -> None:
        """All members step, at the attempts given as slot_0=…, and nothing is under way any more."""
        wanted = {int(k.removeprefix("slot_")): v for k, v in attempts.items()}

        async def runs() -> bool:
            job = await self.board.job(self.job)
            status = job.get("status", {})
            held = {s["slot"]: s["attempt"] for s in status.get("slots", [])}
            world = status.get("world") or {}
            return (
                is_true(job, "Running")
                and not is_true(job, "Recovering")
                and world.get("ready") == world.get("desired") == 2
                and all(held.get(slot, 0) >= attempt for slot, attempt in wanted.items())
                and len(await self.board.pods(self.job)) == 2
                and not any(i.get("open") for i in status.get("incidents", []))
            )

        await self.until(f"running, {attempts or 'from the start'}", runs, limit=limit)

    async def until_condition(self, kind: str) -> None:
        async def holds() -> bool:
            return is_true(await self.board.job(self.job), kind)

        await self.until(f"condition {kind}", holds)

    async def suspend(self, wish: bool) -> None:
        await self.board.patch(self.job, {"spec": {"suspend": wish}})

    async def until_no_pods(self) -> None:
        async def none() -> bool:
            return not await self.board.pods(self.job)

        await self.until("no pod left", none)

    async def break_gpu(self, slot: int, xid: int) -> str:
        """On the GPU of that slot's pod; the node's name."""
        pod = await self.board.current_pod(self.job, slot)
        assert pod is not None
        await asyncio.to_thread(faults.break_gpu, self.lab, pod, xid)
        return pod.node

    async def until_marked(self, node: str) -> None:
        async def marked() -> bool:
            return (await self.board.nodes())[node].cordoned

        await self.until(f"{node} cordoned and tainted", marked)

    async def release(self, node: str) -> None:
        """The machine is repaired and its NodeQuarantine deleted: again, if it was put back."""
        await asyncio.to_thread(self.lab.heal, node)

        async def free() -> bool:
            for quarantine in await self.quarantines():
                await self.board.release(quarantine["metadata"]["name"])
            marked = [mark_of(n) for n in await self.own_nodes() if any(mark_of(n))]
            return not marked and not await self.quarantines()

        await self.until(f"{node} released", free)

    async def lives(self) -> set[tuple[str, int]]:
        """(pod, how often its container was started again)"""
        return {(p.name, p.restarts) for p in await self.board.pods(self.job)}

    async def own_nodes(self) -> list[Object]:
        return await self.api.list("/api/v1/nodes", labelSelector=f"{LABEL}={self.index}")

    async def quarantines(self) -> list[Object]:
        found = await self.api.list(_QUARANTINES)
        return [q for q in found if q["spec"]["nodeName"] in self.nodes]

    async def shape(self) -> Shape:
        job = await self.board.job(self.job)
        pods = await self.api.list(f"{_CORE}/pods", labelSelector=f"{names.LABEL_JOB}={self.job}")
        return build_shape(job, pods, await self.own_nodes(), await self.quarantines())

    async def end(self) -> None:
        """`kubectl delete`: nothing of it may be left, on nodes neither. Raises `NotReached`."""
        job, self.job = self.job, ""
        if not job:
            return
        await self.board.delete(job)

        async def nothing() -> bool:
            return not await self._leftovers(job)

        try:
            await self.until(f"nothing left of {job}", nothing)
        except NotReached:
            raise NotReached(
                f"left of {job} after its deletion: {await self._leftovers(job)}"
            ) from None

    async def _leftovers(self, job: str) -> list[str]:
        left = [f"pod {p.name}" for p in await self.board.pods(job)]
        secrets: list[dict[str, Any]] = await self.api.list(f"{_CORE}/secrets")
        left += [
            f"secret {s['metadata']['name']}"
            for s in secrets
            if any(o.get("name") == job for o in s["metadata"].get("ownerReferences") or [])
        ]
        return left + [f"job {job}"] * await self.board.exists(job)

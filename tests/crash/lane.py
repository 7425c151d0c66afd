"""A lane: a few nodes of the lab with one job at a time, so that several cases run side by side.

The actions of the user, the administrator and the hardware are here. They bypass the proxy.
"""

import asyncio
import json
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
    """An expected state was not reached."""


def _as_merge(document: Any) -> Object:
    """The object that a write sends. For a JSON patch: the top-level status fields that it sets."""
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
        """Label the lane's nodes; the lane's jobs select them by this label."""
        for node in self.nodes:
            change = {"metadata": {"labels": {LABEL: str(self.index)}}}
            await self.api.patch(f"/api/v1/nodes/{node}", change)

    async def until_noted(self) -> None:
        """Wait until the operator has annotated each node with its number of GPUs. This write comes
        only once for each node, so it must not become a case.
        """

        async def noted() -> bool:
            found = [n["metadata"].get("annotations") or {} for n in await self.own_nodes()]
            return all(names.ANNOTATION_EXPECTED_GPUS in annotations for annotations in found)

        await self.until("the GPUs of all nodes noted", noted)

    def concerns(self, call: Call) -> bool:
        """Return whether a call concerns this lane's job or nodes. Requests for the operator's own
        tokens belong to no lane.
        """
        subject = f"{call.bare} {call.body.decode(errors='replace')} "
        if self.job and self.job in subject:
            return True
        ends = ('"', "/", ".", " ", "\\", "-")  # "-": a NodeQuarantine is named after its node
        return any(node + end in subject for node in self.nodes for end in ends)

    def title_of(self, call: Call) -> str:
        """Describe a write in words that are the same in every run: without this job's name, and
        without random parts (the node, the incident, an Event's digest). If the write sets a state
        in the status, the words include that state.
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
        """Poll until `is_so` returns true. An API server that is unavailable for a while is not a
        failure.

        Raises:
            NotReached: with what was awaited and the state of the job.
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

    async def describe_incidents(self) -> str:
        """Return the job's restarts and incidents, one line each, as in its status."""
        status = await self.status()
        lines = [f"restarts: {json.dumps(status.get('restarts'))}"]
        lines += [f"incident: {json.dumps(i)}" for i in status.get("incidents", [])]
        lines += [f"quarantine: {json.dumps(q['spec'])}" for q in await self.quarantines()]
        return "\n".join(lines)

    async def _last_words(self, pod: str) -> str:
        return f"--- {pod}:\n{await self.board.logs(pod, tailLines='30')}"

    async def until_running(self, *, limit: float = LIMIT_SECONDS, **attempts: int) -> None:
        """Wait until both members run and nothing is in progress. `attempts` gives the lowest
        attempt of a slot, as slot_0=….
        """
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
        """Break the GPU of that slot's pod with this XID. Returns the node's name."""
        pod = await self.board.current_pod(self.job, slot)
        assert pod is not None
        await asyncio.to_thread(faults.break_gpu, self.lab, pod, xid)
        return pod.node

    async def until_marked(self, node: str) -> None:
        async def marked() -> bool:
            return (await self.board.nodes())[node].cordoned

        await self.until(f"{node} cordoned and tainted", marked)

    async def release(self, node: str) -> None:
        """Repair the machine and delete its NodeQuarantine, again if it comes back."""
        await asyncio.to_thread(self.lab.heal, node)

        async def free() -> bool:
            for quarantine in await self.quarantines():
                await self.board.release(quarantine["metadata"]["name"])
            marked = [mark_of(n) for n in await self.own_nodes() if any(mark_of(n))]
            return not marked and not await self.quarantines()

        await self.until(f"{node} released", free)

    async def lives(self) -> set[tuple[str, int]]:
        """Return (pod, number of its container's restarts) for all pods."""
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
        """Delete the job and wait until nothing of it is left. Raises `NotReached`."""
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

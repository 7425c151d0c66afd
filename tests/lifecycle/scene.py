"""What a test in this folder can do on the lab, and how it is cleaned up."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from everstep_demo.board import Board, Object, condition
from everstep_demo.runwatch import RunWatch
from everstep_demo.trial import NAMESPACE, URI, Trial
from everstep_lab import Lab
from everstep_lab.api import Api
from stub_image.given import build_stub_job

LIMIT = 240.0
"""The limit of each wait, in seconds. An idle machine needs only a few."""
CORE = f"/api/v1/namespaces/{NAMESPACE}"


class Scene:
    def __init__(self, lab: Lab, api: Api) -> None:
        self.lab, self.api, self.board = lab, api, Board(api)
        self._names: list[str] = []
        self._paths: list[str] = []

    async def start(self, name: str, **given: Any) -> Trial:
        """Start a stub job. `given` is passed to `build_stub_job`. `run` names another run than the
        job's own.
        """
        run = given.pop("run", None)
        job = build_stub_job(name, **given)
        if run is not None:
            job["spec"]["checkpoint"]["run"] = run
        return await self.apply(job)

    async def apply(self, job: Object) -> Trial:
        name = job["metadata"]["name"]
        run = job["spec"]["checkpoint"].get("run") or f"{NAMESPACE}/{name}"
        await self.board.create(job)
        self._names.append(name)
        return Trial(name, self.board, RunWatch(URI, run, self.lab.store_environment))

    async def create(self, path: str, body: Object) -> None:
        """Create any other object. It is deleted at the end of the test."""
        await self.api.create(path, body)
        self._paths.append(f"{path}/{body['metadata']['name']}")

    async def stepping(self, trial: Trial) -> int:
        return await trial.until_stepping(limit=LIMIT)

    async def further(self, trial: Trial, than: int | None = None) -> None:
        """Wait for a step after `than`, by default after the current step."""
        step = await trial.step() if than is None else than

        async def is_further() -> bool:
            return await trial.step() > step

        await trial.until(f"a step after {step}", is_further, limit=LIMIT)

    async def condition(self, trial: Trial, kind: str) -> Object:
        return await trial.until_condition(kind, limit=LIMIT)

    async def told(self, trial: Trial, reason: str) -> str:
        """Wait until the condition Running has this reason; return its message."""

        async def says() -> bool:
            found = condition(await trial.job(), "Running")
            return found is not None and found["reason"] == reason

        await trial.until(f"Running: {reason}", says, limit=LIMIT)
        found = condition(await trial.job(), "Running")
        assert found is not None
        return str(found["message"])

    async def nothing_left(self, name: str) -> None:
        """Wait until nothing is left of the job and its objects."""

        async def gone() -> bool:
            pods = await self.board.pods(name)
            secrets = await self.api.list(f"{CORE}/secrets")
            owned = [s for s in secrets if s["metadata"]["name"].startswith(f"{name}-")]
            return not pods and not owned and not await self.board.exists(name)

        await until(f"nothing left of {name}", gone)

    async def clear(self) -> None:
        for name in self._names:
            await self.board.delete(name)
        for path in reversed(self._paths):
            await self.api.delete(path)
        for node, found in (await self._nodes()).items():
            if found["broken"]:
                self.lab.heal(node)
        for name in self._names:
            await self.nothing_left(name)
        await until("every node free again", self._is_clear)

    async def _is_clear(self) -> bool:
        """Release quarantines and uncordon nodes; return whether every node is free again. A healed
        node takes a moment to boot, during which the API server still shows its old state.
        """
        if any(node["broken"] for node in (await self._nodes()).values()):
            return False
        for quarantine in await self.board.quarantines():
            await self.board.release(quarantine["metadata"]["name"])
        nodes = await self.api.list("/api/v1/nodes")
        for node in nodes:
            if node["spec"].get("unschedulable") and not await self.board.quarantines():
                await self.cordon(node["metadata"]["name"], on=False)
        ready = [n for n in (await self.board.nodes()).values() if n.ready and not n.cordoned]
        return len(ready) == len(nodes) and not await self.board.quarantines()

    async def _nodes(self) -> dict[str, dict[str, Any]]:
        """Return the lab's nodes. `broken` says whether a node has a simulated fault."""
        nodes = (await asyncio.to_thread(self.lab.status))["nodes"]
        return {n: {**d, "broken": is_broken(d)} for n, d in nodes.items()}

    async def cordon(self, node: str, *, on: bool = True) -> None:
        await self.api.patch(f"/api/v1/nodes/{node}", {"spec": {"unschedulable": on}})

    async def node_of(self, trial: Trial, slot: int) -> str:
        pod = await self.board.current_pod(trial.name, slot)
        assert pod is not None
        return pod.node

    async def node(self, name: str) -> Object:
        return await self.api.get(f"/api/v1/nodes/{name}")

    async def is_cordoned(self, node: str) -> bool:
        return bool((await self.node(node))["spec"].get("unschedulable"))

    async def attempts(self, name: str) -> list[int]:
        status = (await self.board.job(name)).get("status", {})
        return [s["attempt"] for s in status.get("slots", [])]


def is_broken(node: dict[str, Any]) -> bool:
    sound = node["powered"] and node["connected"] and node["exporter"] == "ok"
    return not sound or bool(node["faults"])


async def until(what: str, is_so: Callable[[], Awaitable[object]], limit: float = LIMIT) -> None:
    try:
        async with asyncio.timeout(limit):
            while not await is_so():  # noqa: ASYNC110 the cluster sets no event of ours
                await asyncio.sleep(0.2)
    except TimeoutError:
        raise AssertionError(f"waited {limit:.0f} s for: {what}") from None


@contextlib.asynccontextmanager
async def nodes_taken(scene: Scene, count: int) -> Any:
    """In this context, `count` nodes are cordoned by hand; yields their names."""
    names = sorted(await scene.board.nodes())[:count]
    for name in names:
        await scene.cordon(name)
    try:
        yield names
    finally:
        for name in names:
            await scene.cordon(name, on=False)

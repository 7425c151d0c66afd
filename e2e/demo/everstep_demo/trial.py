"""One job on the lab, for tests: its manifest, waiting for a state, its status and run log."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from everstep_contract import names
from everstep_contract.log import Claim, MemberId
from everstep_demo.board import Board, Object, Pod, condition, is_true
from everstep_demo.runwatch import RunWatch

NAMESPACE = "default"
URI = "s3://everstep/tests"
POLL_SECONDS = 0.2


def build_job(
    name: str,
    *,
    replicas: int = 2,
    image: str = "everstep/tiny:test",
    command: tuple[str, ...] = ("everstep", "run", "tiny.py"),
    env: Mapping[str, str] | None = None,
    uri: str = URI,
    secret: str = "object-store",
    spec: Mapping[str, Any] | None = None,
) -> Object:
    """A job as a user would write it; `spec` overrides fields."""
    variables = {"OMP_NUM_THREADS": "1", **(env or {})}
    container = {
        "name": "trainer",
        "image": image,
        "command": list(command),
        "env": [{"name": k, "value": v} for k, v in variables.items()],
        "envFrom": [{"secretRef": {"name": secret}}],
        "resources": {
            "requests": {"cpu": "100m", "memory": "256Mi"},
            "limits": {"nvidia.com/gpu": 1, "memory": "2Gi"},
        },
    }
    spread = {
        "topologyKey": "kubernetes.io/hostname",
        "maxSkew": 1,
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": {names.LABEL_JOB: name}},
    }
    template = {
        "spec": {
            "containers": [container],
            "terminationGracePeriodSeconds": 20,
            "topologySpreadConstraints": [spread],
        }
    }
    return {
        "apiVersion": f"{names.GROUP}/{names.VERSION}",
        "kind": names.KIND,
        "metadata": {"name": name},
        "spec": {
            "workers": {"replicas": replicas, "template": template},
            "checkpoint": {"uri": uri, "everySteps": 50},
            "recovery": {"nodeLostSeconds": 5},
            **(spec or {}),
        },
    }


def first_step_of(claim: Claim) -> int:
    """The first step that this epoch takes."""
    return claim.chain[-1].last_step + 1 if claim.chain else 1


class Trial:
    """A job that was applied to a cluster."""

    def __init__(self, name: str, board: Board, watch: RunWatch) -> None:
        self.name, self.board, self.watch = name, board, watch

    async def job(self) -> Object:
        return await self.board.job(self.name)

    async def step(self) -> int:
        return int((await self.job()).get("status", {}).get("step") or 0)

    async def until(
        self, what: str, is_so: Callable[[], Awaitable[object]], *, limit: float = 60.0
    ) -> None:
        """Poll until `is_so` holds. The error says what was awaited and the job's state."""
        try:
            async with asyncio.timeout(limit):
                while not await is_so():
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError:
            raise AssertionError(
                f"waited {limit:.0f} s for: {what}. {await self.explain()}"
            ) from None

    async def explain(self) -> str:
        status = (await self.job()).get("status", {})
        pods = ", ".join(
            f"{p.name} {p.phase} on {p.node}" for p in await self.board.pods(self.name)
        )
        conditions = "; ".join(
            f"{c['type']}={c['status']} ({c['reason']}: {c['message']})"
            for c in status.get("conditions", [])
        )
        await self.watch.refresh()
        return (
            f"The job: {status.get('state')}, step {status.get('step')}, "
            f"epoch {status.get('epoch')} (log: {self.watch.epoch}), "
            f"pods: {pods or 'none'}; {conditions}"
        )

    async def until_condition(self, kind: str, *, limit: float = 90.0) -> Object:
        """Wait until the condition is True; returns it."""

        async def holds() -> bool:
            return is_true(await self.job(), kind)

        await self.until(f"condition {kind}", holds, limit=limit)
        found = condition(await self.job(), kind)
        assert found is not None
        return found

    async def until_stepping(self, *, limit: float = 90.0) -> int:
        """Wait until the job has taken a step in its newest epoch; returns the epoch."""

        async def steps() -> bool:
            job = await self.job()
            await self.watch.refresh()
            status = job.get("status", {})
            same = status.get("epoch") == self.watch.epoch and self.watch.epoch > 0
            return is_true(job, "Running") and same and int(status.get("step") or 0) > 0

        await self.until("steps", steps, limit=limit)
        return self.watch.epoch

    async def until_recovered(self, epoch: int, *, limit: float = 90.0) -> None:
        """Wait until a later epoch with as many workers as the job asks for has taken a step."""
        awaited = f"a step of an epoch after {epoch} at full size"
        await self._until_full_size(awaited, lambda claim: claim.epoch > epoch, limit)

    async def until_replaced(self, pod: Pod, *, limit: float = 90.0) -> None:
        """Wait until as many workers as the job asks for have taken a step without this pod. The
        next attempt of its slot, or a spare, has taken its place.
        """

        def is_without(claim: Claim) -> bool:
            return all((m.slot, m.attempt) != (pod.slot, pod.attempt) for m in claim.members)

        await self._until_full_size(f"a step at full size without {pod.name}", is_without, limit)

    async def nodes(self) -> set[str]:
        """The nodes of the pods that are members of the newest claim."""
        members = {(m.slot, m.attempt) for m in (await self.members()).values()}
        return {p.node for p in await self.board.pods(self.name) if (p.slot, p.attempt) in members}

    async def _until_full_size(
        self, awaited: str, holds: Callable[[Claim], bool], limit: float
    ) -> None:
        async def stepped() -> bool:
            await self.watch.refresh()
            job, claim = await self.job(), self.watch.newest_claim
            if claim is None or not holds(claim) or not is_true(job, "Running"):
                return False
            whole = len(claim.members) >= int(job["spec"]["workers"]["replicas"])
            return whole and await self.step() >= first_step_of(claim)

        await self.until(awaited, stepped, limit=limit)

    async def members(self) -> dict[int, MemberId]:
        """The members of the newest claim, by slot; for a slot with several ranks, the last one."""
        await self.watch.refresh()
        claim = self.watch.newest_claim
        return {} if claim is None else {m.slot: m for m in claim.members}

    async def incidents(self) -> list[Object]:
        found: list[Object] = (await self.job())["status"].get("incidents") or []
        return found

    async def steps_lost(self) -> int:
        incidents = (await self.job())["status"].get("incidents") or []
        unknown = [i["id"] for i in incidents if not i.get("open") and i.get("stepsLost") is None]
        assert not unknown, f"the steps lost are unknown for {unknown}"
        return sum(int(i.get("stepsLost") or 0) for i in incidents)

    async def restarted_containers(self) -> int:
        """How often kubelets restarted a container of the job."""
        return sum(p.restarts for p in await self.board.pods(self.name))

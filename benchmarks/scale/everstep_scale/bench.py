"""The measured phases: nodes, start of all jobs, no changes, training, restart of the operator."""

import asyncio
import base64
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

from everstep_contract import env, names
from everstep_lab import Lab
from everstep_lab.api import Api, UnreachableError
from everstep_lab.seam import LabError
from everstep_scale import meter, objects
from everstep_scale.agents import Agents
from everstep_scale.calling import Caller
from everstep_scale.exporters import Exporters
from everstep_scale.kubelets import Kubelets, job_of
from everstep_scale.listening import listen
from everstep_scale.meter import Usage
from everstep_scale.objects import NAMESPACE, Object, Size
from everstep_scale.table import Phase

OPERATOR_FLAGS = ("--scrape-seconds=15", "--scrape-timeout-seconds=5", "--agent-seconds=1")
"""The operator's defaults, which differ from the lab's. No Lease, because its renewals would be counted as writes."""
LIMIT_SECONDS = 900.0
SETTLE_SECONDS = 3.0


@dataclass(slots=True)
class Bench:
    lab: Lab
    api: Api
    size: Size
    steady_seconds: float
    say: Callable[[str], None]
    agents: Agents = field(default_factory=Agents)
    exporters: Exporters = field(default_factory=lambda: Exporters(nodes={}))
    phases: list[Phase] = field(default_factory=list)

    async def run(self) -> list[Phase]:
        network = self.lab.places.network
        numbers = itertools.count()
        for number in range(self.size.nodes):
            address = objects.exporter_address(network, number)
            self.exporters.nodes[address] = objects.node_name(number)
        by_node = {node: address for address, node in self.exporters.nodes.items()}

        def place(pod: Object) -> str:
            if not job_of(pod):
                return by_node[pod["spec"]["nodeName"]]
            return objects.worker_address(network, next(numbers))

        async def started(pod: Object, address: str) -> None:
            if job := job_of(pod):
                await self.agents.start(address, job, await self._read_token(pod))

        kubelets = Kubelets(self.api, place, started)
        exporters = await listen(self.exporters.answer, by_node.values(), objects.EXPORTER_PORT)
        async with beside(kubelets.run()):
            try:
                await self._play(kubelets)
            finally:
                await exporters.cleanup()
                await self.agents.close()
        return self.phases

    async def _read_token(self, pod: Object) -> str:
        """Read the token from the Secret, as a kubelet does for the container's environment."""
        variables = pod["spec"]["containers"][0]["env"]
        source = next(v["valueFrom"] for v in variables if v["name"] == env.PREFIX + "TOKEN")
        name, key = source["secretKeyRef"]["name"], source["secretKeyRef"]["key"]
        secret = await self.api.get(f"/api/v1/namespaces/{NAMESPACE}/secrets/{name}")
        return base64.b64decode(secret["data"][key]).decode()

    async def _play(self, kubelets: Kubelets) -> None:
        await self._create_nodes()
        self.say(f"{self.size.nodes} nodes with {objects.GPUS} GPUs and an exporter each")
        await self._first_start()
        async with beside(kubelets.beat(self.size.nodes)):
            await self._start_jobs()
            await self._settle()
            await self._steady("quiet")
            self.agents.training = True
            await self._steady("training")
            self.agents.training = False
            await self._settle()
            await self._restart()

    async def _create_nodes(self) -> None:
        count = range(self.size.nodes)
        await self._create("/api/v1/nodes", map(objects.build_node, count))

    async def _create(self, path: str, bodies: Iterable[Object]) -> None:
        await Caller().all(partial(self.api.create, path, body) for body in bodies)

    async def _first_start(self) -> None:
        """At the first start the operator annotates every node with its GPUs, once."""
        began = time.monotonic()
        await asyncio.to_thread(self.lab.operator_start)
        self.say(f"the operator is ready after {time.monotonic() - began:.1f} s")
        await self._until("every node to be watched", self._all_noted)
        self._note("first start", began, Usage())

    async def _all_noted(self) -> bool:
        nodes = await self.api.list("/api/v1/nodes")
        key = names.ANNOTATION_EXPECTED_GPUS
        return all(key in (n["metadata"].get("annotations") or {}) for n in nodes)

    async def _start_jobs(self) -> None:
        before, began = self._usage(), time.monotonic()
        path = f"/apis/{names.GROUP}/{names.VERSION}/namespaces/{NAMESPACE}/{names.PLURAL}"
        await self._create(path, map(objects.build_job, range(self.size.jobs)))
        self.say(f"{self.size.jobs} jobs applied in {time.monotonic() - began:.1f} s")
        await self._until("every job to run", self._all_run)
        self._note("all jobs start", began, before)

    async def _all_run(self) -> bool:
        states = await meter.count_states(self.api)
        return states["Running"] == self.size.jobs

    async def _settle(self) -> None:
        """Wait until delayed writes (figures, Events) are done."""
        await self._until("every status to show its job's step", self._all_shown)
        before = -1
        while (writes := self._usage().writes) != before:
            before = writes
            await asyncio.sleep(SETTLE_SECONDS)

    async def _all_shown(self) -> bool:
        return await meter.list_steps(self.api) == self.agents.steps

    async def _steady(self, name: str) -> None:
        before, versions = self._usage(), await meter.list_versions(self.api)
        began, asked, scraped = time.monotonic(), self.agents.asked, self.exporters.asked
        await asyncio.sleep(self.steady_seconds)
        after = await meter.list_versions(self.api)
        changed = sum(versions.get(uid) != version for uid, version in after.items())
        self._note(name, began, before, asked=asked, scraped=scraped, changed=changed)

    async def _restart(self) -> None:
        versions = await meter.list_versions(self.api)
        await asyncio.to_thread(self.lab.operator_kill)
        began, asked, scraped = time.monotonic(), self.agents.asked, self.exporters.asked
        await asyncio.to_thread(self.lab.operator_start)
        self.say(f"a new operator is ready after {time.monotonic() - began:.1f} s")
        await asyncio.sleep(self.steady_seconds)
        after = await meter.list_versions(self.api)
        changed = sum(versions.get(uid) != version for uid, version in after.items())
        self._note("new operator", began, Usage(), asked=asked, scraped=scraped, changed=changed)

    async def _until(self, what: str, happens: Callable[[], Awaitable[bool]]) -> None:
        try:
            async with asyncio.timeout(LIMIT_SECONDS):
                while not await _surely(happens):
                    self._check_operator()
                    await asyncio.sleep(1)
        except TimeoutError:
            states = dict(await meter.count_states(self.api))
            text = f"waited {LIMIT_SECONDS:.0f} s for {what}; jobs: {states}"
            raise LabError(text) from None

    def _check_operator(self) -> None:
        ended = self.lab.status()["operator"]["ended"]
        if ended is not None:
            raise LabError(f"the operator ended with {ended}:\n{self.lab.operator_logs()[-2000:]}")

    def _page(self) -> str:
        return meter.fetch(self.lab.operator_metrics_url)

    def _usage(self) -> Usage:
        pid = self.lab.status()["operator"]["pid"]
        return meter.read_usage(pid, self._page())

    def _note(
        self, name: str, began: float, before: Usage, *, asked: int = 0, scraped: int = 0,
        changed: int = 0,
    ) -> None:  # fmt: skip
        phase = Phase(
            name=name,
            seconds=time.monotonic() - began,
            usage=self._usage().since(before),
            asked=self.agents.asked - asked,
            scraped=self.exporters.asked - scraped,
            changed=changed,
        )
        self.phases.append(phase)
        self.say(f"{name}: {phase.seconds:.1f} s, {phase.usage.writes} writes, {changed} changed")


async def _surely(happens: Callable[[], Awaitable[bool]]) -> bool:
    """Like `happens`, but False while the API server does not answer."""
    try:
        return await happens()
    except UnreachableError:
        return False


@asynccontextmanager
async def beside(work: Awaitable[None]) -> AsyncIterator[None]:
    """Run `work` in parallel with the block; if it fails, the block ends."""
    async with asyncio.TaskGroup() as group:
        task = group.create_task(_run(work))
        yield
        task.cancel()


async def _run(work: Awaitable[None]) -> None:
    await work

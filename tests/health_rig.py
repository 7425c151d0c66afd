"""The health loop with real exporters on loopback, a toy API server and a fake clock."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from everstep_operator.health.loop import HealthLoop
from everstep_operator.settings import Settings
from everstep_operator.values import NodeVerdict
from everstep_operator.world import World
from fake_exporter import FakeExporter, an_exporter, running_exporter
from toy_cluster import ToyCluster

A, B = "GPU-aaaa", "GPU-bbbb"


def a_page(
    energy: int,
    *,
    uuids: tuple[str, ...] = (A, B),
    xid: int = 0,
    remap: int = 0,
    pod: str = "",
    host: str = "x",
) -> str:
    lines = []
    for uuid in uuids:
        first = uuid == A
        holder = f',namespace="default",pod="{pod}"' if pod and uuid == uuids[0] else ""
        labels = f'gpu="{int(not first)}",UUID="{uuid}",Hostname="{host}"{holder}'
        lines += [
            f"DCGM_FI_DEV_XID_ERRORS{{{labels}}} {xid if first else 0}",
            f"DCGM_FI_DEV_ROW_REMAP_FAILURE{{{labels}}} {remap if first else 0}",
            f"DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{{{labels}}} {energy}",
        ]
    return "\n".join(lines) + "\n"


@dataclass(slots=True)
class Receiver:
    verdicts: Mapping[str, NodeVerdict] = field(default_factory=dict)
    judged_at: Mapping[str, float] = field(default_factory=dict)
    spoken: asyncio.Event = field(default_factory=asyncio.Event)

    def publish(self, verdicts: Mapping[str, NodeVerdict], judged_at: Mapping[str, float]) -> None:
        self.verdicts, self.judged_at = verdicts, judged_at
        if verdicts:
            self.spoken.set()

    def states(self) -> dict[str, str]:
        return {node: verdict.state.value for node, verdict in self.verdicts.items()}


@dataclass(slots=True)
class Rig:
    """Two GPU nodes, with an exporter on the first one."""

    exporter: FakeExporter
    cluster: ToyCluster
    world: World
    receiver: Receiver
    now: float = 1_000_000.0
    energy: Iterator[int] = field(default_factory=lambda: itertools.count(1, 300))
    page: dict[str, object] = field(default_factory=dict)
    loop: HealthLoop = field(init=False)

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.loop = HealthLoop(
            kube=self.cluster,  # type: ignore[arg-type]
            world=self.world,
            settings=Settings(scrape_seconds=1.0, scrape_timeout_seconds=1.0, cordon_budget="2"),
            verdicts=self.receiver,
            clock=lambda: self.now,
        )

    async def rounds(self, count: int = 1, **page: object) -> "Rig":
        """Scrape `count` times, one second apart, with a pass after each scrape."""
        self.page = page or self.page
        for _ in range(count):
            self.now += 1
            self.exporter.page = a_page(next(self.energy), **self.page)  # type: ignore[arg-type]
            await self.loop.scrape_once()
            await self.passes()
        return self

    async def passes(self) -> None:
        self.world.nodes.replace(self.cluster._of("nodes"), str(self.cluster.version))
        await self.loop.pass_once()

    def node(self, name: str = "node-0") -> dict[str, object]:
        return dict(self.cluster.node(name)["spec"])


def ports_of(exporter: FakeExporter) -> list[dict[str, object]]:
    return [{"name": "metrics", "containerPort": exporter.port}]


@asynccontextmanager
async def a_rig() -> AsyncIterator[Rig]:
    async with running_exporter() as exporter:
        cluster, world = ToyCluster(), World()
        cluster.add_nodes(2)
        cluster.pods = [
            an_exporter("dcgm", node="node-0", ports=ports_of(exporter), address="127.0.0.1")
        ]
        world.nodes.replace(cluster._of("nodes"), str(cluster.version))
        world.ready = True
        rig = Rig(exporter, cluster, world, Receiver())
        yield rig
        await rig.loop.close()

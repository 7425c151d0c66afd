"""The loop as a whole: real exporters on loopback, a toy API server, a fake clock."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field

import pytest

from everstep_operator import kube
from everstep_operator.health.loop import HealthLoop
from everstep_operator.settings import Settings
from everstep_operator.values import NodeState, NodeVerdict
from everstep_operator.world import World
from fake_exporter import FakeExporter, running_exporter
from toy_cluster import ToyCluster

A, B = "GPU-aaaa", "GPU-bbbb"


def a_page(
    energy: int, *, uuids: tuple[str, ...] = (A, B), xid: int = 0, remap: int = 0, pod: str = ""
) -> str:
    lines = []
    for uuid in uuids:
        first = uuid == A
        holder = f',namespace="default",pod="{pod}"' if pod and first else ""
        labels = f'gpu="{int(not first)}",UUID="{uuid}",Hostname="x"{holder}'
        lines += [
            f"DCGM_FI_DEV_XID_ERRORS{{{labels}}} {xid if first else 0}",
            f"DCGM_FI_DEV_ROW_REMAP_FAILURE{{{labels}}} {remap if first else 0}",
            f"DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{{{labels}}} {energy}",
        ]
    return "\n".join(lines) + "\n"


@dataclass(slots=True)
class Receiver:
    verdicts: Mapping[str, NodeVerdict] = field(default_factory=dict)
    spoken: asyncio.Event = field(default_factory=asyncio.Event)

    def publish(self, verdicts: Mapping[str, NodeVerdict]) -> None:
        self.verdicts = verdicts
        if verdicts:
            self.spoken.set()

    def states(self) -> dict[str, str]:
        return {node: verdict.state.value for node, verdict in self.verdicts.items()}


@dataclass(slots=True)
class Rig:
    """Two GPU nodes, an exporter on the first."""

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
        """Scrapes one second apart, each followed by a pass."""
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


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with running_exporter() as exporter:
        cluster, world = ToyCluster(), World()
        cluster.add_nodes(2)
        cluster.pods = [
            {
                "metadata": {"name": "dcgm-exporter-x"},
                "spec": {
                    "nodeName": "node-0",
                    "containers": [
                        {"ports": [{"name": "metrics", "containerPort": exporter.port}]}
                    ],
                },
                "status": {"phase": "Running", "podIP": "127.0.0.1"},
            }
        ]
        world.nodes.replace(cluster._of("nodes"), str(cluster.version))
        world.ready = True
        rig = Rig(exporter, cluster, world, Receiver())
        yield rig
        await rig.loop._scraper.close()


async def test_healthy_pages_lead_to_the_list_of_gpus_and_to_nothing_else(rig: Rig) -> None:
    await rig.rounds(5)
    assert rig.receiver.states() == {}
    assert rig.cluster.writes == ["patch nodes node-0"]
    assert rig.cluster.nodes()["node-0"].expected == (A, B)


async def test_act_one_xid_64_leads_to_leaving_and_a_cordon_in_one_round(rig: Rig) -> None:
    await rig.rounds(2)
    await rig.rounds(1, xid=64, remap=1)
    verdict = rig.receiver.verdicts["node-0"]
    assert verdict.state is NodeState.LEAVING
    assert verdict.quarantined
    assert set(verdict.marks) == {"signal", "verdict", "cordon"}
    assert rig.node()["unschedulable"] is True
    (quarantine,) = rig.cluster.quarantines()
    assert (quarantine.state, quarantine.incident) == ("Quarantined", verdict.incident)


async def test_act_two_a_gpu_that_vanishes_is_suspect_twice_and_then_gone(rig: Rig) -> None:
    await rig.rounds(2, pod="byte-lm-0-1")
    seen = []
    for _ in range(3):
        await rig.rounds(1, uuids=(B,))
        verdict = rig.receiver.verdicts["node-0"]
        seen.append((verdict.state.value, verdict.incident))
    states, incidents = zip(*seen, strict=True)
    assert states == ("suspect", "suspect", "gone")
    assert len(set(incidents)) == 1
    assert rig.receiver.verdicts["node-0"].state_of("default", "byte-lm-0-1") is NodeState.GONE
    assert rig.receiver.verdicts["node-0"].state_of("default", "byte-lm-1-1") is NodeState.LEAVING
    assert rig.node()["unschedulable"] is True


async def test_a_rank_that_dies_makes_its_node_suspect_at_once_until_a_later_page(rig: Rig) -> None:
    await rig.rounds(3)
    rig.now += 0.1
    rig.loop.rank_died("node-0")
    assert rig.receiver.states() == {"node-0": "suspect"}
    await rig.rounds(1)
    assert rig.receiver.states() == {"node-0": "suspect"}
    await rig.rounds(1)
    assert rig.receiver.states() == {}
    rig.loop.rank_died("node-1")
    assert rig.receiver.states() == {}


@pytest.mark.parametrize("mode", ["hang", "http500", "empty", "garbage"])
async def test_an_exporter_gone_silent_is_reported_and_nobody_is_cordoned(
    rig: Rig, mode: str
) -> None:
    await rig.rounds(2)
    rig.exporter.mode = mode
    await rig.rounds(3)
    assert rig.receiver.states() == {"node-0": "unknown"}
    assert not rig.receiver.verdicts["node-0"].avoided
    assert rig.cluster.quarantines() == ()
    rig.exporter.mode = "page"
    await rig.rounds(1)
    assert rig.receiver.states() == {}


async def test_an_exporter_pod_that_is_gone_is_silence_as_well(rig: Rig) -> None:
    await rig.rounds(2)
    rig.cluster.pods = []
    rig.loop._listed_at = None
    await rig.rounds(3)
    assert rig.receiver.states() == {"node-0": "unknown"}


async def test_deleting_the_quarantine_releases_and_old_evidence_does_not_come_back(
    rig: Rig,
) -> None:
    await rig.rounds(1)
    await rig.rounds(2, xid=64)
    (quarantine,) = rig.cluster.quarantines()
    deleted = rig.cluster.remove(kube.QUARANTINES, quarantine.name)
    rig.loop.quarantine_deleted(deleted)
    await rig.rounds(3)
    assert not rig.node().get("unschedulable")
    assert rig.receiver.states() == {}
    rig.restart()
    await rig.rounds(3)
    assert rig.receiver.states() == {}
    await rig.rounds(1, xid=0)
    await rig.rounds(1, xid=64)
    assert rig.receiver.states() == {"node-0": "leaving"}


async def test_a_restarted_operator_says_the_same_of_the_same_incident(rig: Rig) -> None:
    await rig.rounds(1)
    await rig.rounds(1, xid=64)
    before = rig.receiver.verdicts["node-0"]
    writes = len(rig.cluster.writes)
    rig.restart()
    await rig.rounds(3)
    after = rig.receiver.verdicts["node-0"]
    assert (after.incident, after.state, after.marks) == (
        before.incident,
        before.state,
        before.marks,
    )
    assert len(rig.cluster.writes) == writes


async def test_without_the_crd_jobs_still_hear_the_verdict(rig: Rig) -> None:
    rig.cluster.crd = "missing"
    await rig.rounds(1)
    await rig.rounds(3, xid=64)
    assert rig.receiver.states() == {"node-0": "leaving"}
    assert not rig.node()["unschedulable"]
    assert rig.cluster.reasons() == ["QuarantinesUnreadable"]


async def test_the_running_loop_scrapes_by_itself_and_stops_when_cancelled(rig: Rig) -> None:
    rig.exporter.page = a_page(1, xid=95)
    task = asyncio.create_task(rig.loop.run())
    async with asyncio.timeout(20):
        await rig.receiver.spoken.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert rig.receiver.states() == {"node-0": "leaving"}


async def test_the_metrics_tell_of_scrapes_verdicts_and_the_budget(rig: Rig) -> None:
    await rig.rounds(1)
    await rig.rounds(1, xid=64)
    text = rig.loop.render_metrics()
    assert 'everstep_exporter_scrapes_total{outcome="ok"} 2.0' in text
    assert 'everstep_node_verdicts{state="leaving"} 1.0' in text
    assert 'everstep_quarantines{state="Quarantined"} 1.0' in text
    assert "everstep_quarantine_budget 2.0" in text

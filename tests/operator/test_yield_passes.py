"""A node loses power: from its silence to a full job again, with the operator's real passes."""

from dataclasses import dataclass, field, replace
from typing import cast

from everstep_contract import levels, names
from everstep_operator import kube
from everstep_operator.jobs import passes
from everstep_operator.jobs.agents import Agents
from everstep_operator.kube import Kube
from everstep_operator.world import World
from job_builders import a_spec
from toy_jobs import ToyCluster, ToyJob

KEY = ("team", "lm")
LOST = ("node-1", 1)
"""The lost node and its slot."""


@dataclass
class YieldingJob(ToyJob):
    """Leaves silent members out if the operator allows it, and lets their next pods join."""

    yielded: set[tuple[int, int]] = field(default_factory=set)

    def seen(self) -> levels.Seen:
        alive = self._alive()
        silent = () if self.running else sorted(self.members - alive)
        return replace(
            super().seen(),
            silent=tuple(levels.SlotAttempt(slot=s, attempt=a) for s, a in silent),
            yielded=tuple(y for y in self._told() if (y.slot, y.attempt) in self.yielded),
        )

    def tick(self) -> None:
        super().tick()
        allowed = {(y.slot, y.attempt) for y in self._told() if y.epoch == self.epoch}
        silent = self.members - self._alive()
        if not self.running and silent and silent <= allowed:
            self.members -= silent
            self.yielded |= silent
            self.epoch, self.running = self.epoch + 1, True
        elif self.running and self.wanted is not None:
            peers = {(p.slot, p.attempt) for p in self.wanted.peers} & self._alive()
            self.running = peers <= self.members

    def _told(self) -> tuple[levels.Yield, ...]:
        return self.wanted.yields if self.wanted else ()


@dataclass
class Scene:
    cluster: ToyCluster = field(default_factory=ToyCluster)
    silent_since: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        metadata = {"name": "lm", "namespace": "team", "generation": 1}
        self.cluster.put(kube.JOBS, {"metadata": metadata, "spec": a_spec()})
        for number in range(4):
            self.cluster.add_node(f"node-{number}")
        self.job = YieldingJob(cluster=self.cluster)
        self.operator = passes.Passes(
            port=cast(Kube, self.cluster), world=World(), agents=cast(Agents, self.job),
            key=b"k" * 32, clock=lambda: self.cluster.now, steady=lambda: self.cluster.now,
            figures_seconds=10.0,
            silent_nodes=lambda: {n: self.cluster.now - t for n, t in self.silent_since.items()},
        )  # fmt: skip
        self.operator.verdicts = {}

    async def pass_time(self, seconds: int) -> None:
        for _ in range(seconds):
            self.cluster.tick()
            self.job.tick()
            self.cluster.feed(self.operator.world)
            for _ in range(3):  # a pass that counts is followed by one that acts
                await self.operator.run(KEY)
                self.cluster.feed(self.operator.world)

    def cut_power(self, node: str) -> None:
        """Kubernetes does not notice at once, so the node stays Ready."""
        self.cluster.dead_nodes.add(node)
        self.silent_since[node] = self.cluster.now

    def slot(self, number: int) -> dict[str, object]:
        found: dict[str, object] = self.cluster.job()["status"]["slots"][number]
        return found


async def test_a_node_without_power_costs_the_limit_and_the_start_of_a_pod() -> None:
    scene = Scene()
    await scene.pass_time(10)
    assert scene.job.running
    assert scene.slot(LOST[1])["node"] == LOST[0]
    epoch = scene.job.epoch
    scene.cut_power(LOST[0])
    await scene.pass_time(24)
    assert not scene.job.running
    assert scene.slot(1)["attempt"] == 1
    await scene.pass_time(3)
    assert scene.job.epoch == epoch + 1
    assert scene.job.yielded == {(1, 1)}
    assert (scene.slot(1)["attempt"], scene.slot(1)["cause"]) == (2, "NodeLost")
    await scene.pass_time(6)
    assert scene.job.members == {(0, 1), (1, 2), (2, 1)}
    assert scene.job.running
    assert scene.slot(1)["node"] == "node-3"
    status = scene.cluster.job()["status"]
    assert status["restarts"]["byCause"] == {"NodeLost": 1}
    assert [i["cause"] for i in status["incidents"]] == ["NodeLost"]


async def test_a_node_that_is_back_in_time_keeps_its_pod() -> None:
    scene = Scene()
    await scene.pass_time(10)
    scene.cut_power(LOST[0])
    await scene.pass_time(20)
    scene.cluster.dead_nodes.clear()
    scene.silent_since.clear()
    await scene.pass_time(20)
    assert scene.job.running
    assert [s["attempt"] for s in scene.cluster.job()["status"]["slots"]] == [1, 1, 1]
    assert [p for p in scene.cluster.made if p == names.pod_name("lm", 1, 2)] == []

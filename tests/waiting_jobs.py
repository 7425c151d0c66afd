"""Many jobs without room, under an operator's real passes.

The clock jumps to what is due next.
"""

import heapq
from dataclasses import dataclass, field
from typing import Any, cast

from everstep_contract import names
from everstep_operator import kube
from everstep_operator.handlers import VerdictBoard
from everstep_operator.jobs.agents import Agents
from everstep_operator.jobs.passes import Passes
from everstep_operator.jobs.reports import JobReport
from everstep_operator.kube import Kube
from everstep_operator.values import NodeState, NodeVerdict
from everstep_operator.world import Key, World, job_of
from job_builders import a_spec
from patches import copied
from toy_jobs import ToyCluster

NO_ROOM = "0/4 nodes are available: 4 Insufficient nvidia.com/gpu."
SPARED = "node-spared"
"""A node with a verdict against it, which the pods of all jobs avoid."""


class Silent:
    """Agents that have never reported, because no pod runs."""

    def report_on(self, key: Key) -> JobReport:
        return JobReport()

    def tell(self, *told: object) -> None: ...

    def forget(self, key: Key) -> None: ...


@dataclass
class Waiting:
    """`passes_of` counts the passes of each job."""

    jobs: int
    replicas: int = 2
    spec: dict[str, Any] = field(default_factory=dict)
    cluster: ToyCluster = field(default_factory=ToyCluster)
    passes_of: dict[Key, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._due: dict[Key, float] = {}
        self._heap: list[tuple[float, Key]] = []
        self.world = World()
        for number in range(self.jobs):
            metadata = {"name": f"job-{number:04}", "namespace": "team", "generation": 1}
            spec = a_spec(replicas=self.replicas, **self.spec)
            self.world.jobs.put(
                copied(self.cluster.put(kube.JOBS, {"metadata": metadata, "spec": spec}))
            )
        self.cluster.add_node(SPARED)
        self.world.nodes.put(copied(self.cluster.objects["nodes", SPARED]))
        self.world.ready = True
        self.passes = Passes(
            port=cast(Kube, self.cluster), world=self.world, agents=cast(Agents, Silent()),
            key=b"k" * 32, clock=lambda: self.cluster.now, steady=lambda: self.cluster.now,
            figures_seconds=10.0, wake=self.wake,
        )  # fmt: skip
        self.board = VerdictBoard(self.passes, self.wake)

    def wake(self, key: Key, after: float = 0.0) -> None:
        at = self.cluster.now + after
        if self._due.get(key, float("inf")) > at:
            self._due[key] = at
            heapq.heappush(self._heap, (at, key))

    def publish(self, *against: str) -> None:
        found = {
            n: NodeVerdict(node=n, state=NodeState.LEAVING, reason="GpuFatalXid", message="m")
            for n in against
        }
        self.board.publish(found, {})

    async def run(self, seconds: float) -> int:
        """Run all passes that are due within `seconds`; return their number."""
        end, made = self.cluster.now + seconds, 0
        while self._heap and self._heap[0][0] <= end:
            at, key = heapq.heappop(self._heap)
            if self._due.get(key) != at:
                continue
            del self._due[key]
            self.cluster.now = max(self.cluster.now, at)
            made += 1
            self.passes_of[key] = self.passes_of.get(key, 0) + 1
            again = await self.passes.run(key)
            self._watch()
            if again is not None:
                self.wake(key, again)
        self.cluster.now = end
        return made

    def _watch(self) -> None:
        """Let the scheduler look at each new pod, and let the watch report the result."""
        for (plural, name), pod in list(self.cluster.objects.items()):
            if plural == "pods" and "status" not in pod:
                self._say_no_room(name, pod)

    def _say_no_room(self, name: str, pod: dict[str, Any]) -> None:
        said = {"type": "PodScheduled", "status": "False", "message": NO_ROOM}
        pod["status"] = {"phase": "Pending", "conditions": [said]}
        self.tell_of(name)

    def place(self, name: str, node: str) -> None:
        """Let the scheduler find a node for the pod. The pod's image pull then never ends."""
        self.cluster.add_node(node)
        self.world.nodes.put(copied(self.cluster.objects["nodes", node]))
        self.cluster.objects["pods", name]["spec"]["nodeName"] = node
        self.tell_of(name)

    def tell_of(self, name: str) -> None:
        pod = self.cluster.objects["pods", name]
        self.cluster._touch(pod)
        self.world.pods.put(copied(pod))
        if key := job_of(pod):
            self.wake(key)

    def delete_marked(self) -> None:
        """Do the work of the kubelets and the garbage collector: remove whatever is being deleted."""
        for (plural, name), pod in list(self.cluster.objects.items()):
            if plural == "pods" and "deletionTimestamp" in pod["metadata"]:
                del self.cluster.objects[plural, name]
                self.world.pods.drop(pod)
                if key := job_of(pod):
                    self.wake(key)

    def state_of(self, number: int) -> str:
        return str(self._status_of(number)["state"])

    def has_given_back(self, number: int) -> bool:
        return "gang" in self._status_of(number)

    def _status_of(self, number: int) -> dict[str, Any]:
        status: dict[str, Any] = self.cluster.objects[names.PLURAL, f"job-{number:04}"]["status"]
        return status


async def start(jobs: int, **given: Any) -> Waiting:
    """Run jobs until all their pods exist. No pod has a node, and one node has a verdict against it."""
    found = Waiting(jobs, **given)
    found.publish(SPARED)
    await found.run(30.0)
    return found

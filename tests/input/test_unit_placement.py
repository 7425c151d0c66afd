"""A real scheduler places the operator's pods: a unit stays together, and spares go to another rack."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from everstep_contract import names
from everstep_lab import Lab
from everstep_operator.jobs import observe
from everstep_operator.jobs.actions import CreatePod
from everstep_operator.jobs.observed import Job, NodeFact, Observed
from everstep_operator.jobs.plan import plan
from everstep_operator.model_status import JobStatus
from everstep_operator.values import NodeState
from input.api_server import JOBS, ApiServer, a_document
from job_builders import NOW, TEMPLATE, a_pod, a_slot, a_verdict

pytestmark = pytest.mark.lab

NODES, PODS = "/api/v1/nodes", "/api/v1/namespaces/default/pods"
ROOM = {"cpu": "2", "memory": "64Gi", "pods": "110"}
UNREADY = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
"""The taints that the nodes get because nobody renews their leases."""


@dataclass(slots=True)
class Racks:
    """Nodes without a kubelet, on which pods are placed but never start."""

    server: ApiServer
    lab: Lab
    rack_of: dict[str, str] = field(default_factory=dict)
    node_of: dict[int, str] = field(default_factory=dict)
    """Slot → the node on which its newest pod was placed."""
    left: set[str] = field(default_factory=set)
    """Nodes with a verdict."""

    def add(self, node: str, rack: str) -> None:
        labels = {"kubernetes.io/hostname": node, names.NODE_RACK: rack, "for": "units"}
        ready = {"type": "Ready", "status": "True"}
        self._send(
            "POST",
            NODES,
            {
                "metadata": {"name": node, "labels": labels},
                "status": {"allocatable": ROOM, "capacity": ROOM, "conditions": [ready]},
            },
        )
        self.rack_of[node] = rack

    def create_job(self, name: str, *, cpu: str, **workers: int) -> Job:
        container = {**TEMPLATE["spec"]["containers"][0], "resources": {"requests": {"cpu": cpu}}}
        template = {
            "spec": {
                "containers": [container],
                "nodeSelector": {"for": "units"},
                "tolerations": [{"key": key, "operator": "Exists"} for key in UNREADY],
            }
        }
        spec = {
            "workers": {**workers, "template": template},
            "parallelism": {"shard": 2},
            "checkpoint": {"uri": "s3://bucket/folder"},
        }
        return observe.to_job(self._send("POST", JOBS, a_document(spec, name)))

    def place(self, job: Job, attempts: Mapping[int, int] | None = None) -> None:
        """Create what the plan creates, and wait for the scheduler.

        Args:
            attempts: slot → attempt, of pods that leave their nodes.
        """
        moved = attempts or {}
        self.left |= {self.node_of[slot] for slot in moved}
        stay = {s: node for s, node in self.node_of.items() if s not in moved}
        records = [a_slot(s, node=node) for s, node in stay.items()]
        records += [a_slot(s, n, pod_uid=None, node=None) for s, n in moved.items()]
        status = JobStatus(slots=sorted(records, key=lambda r: r.slot))
        observed = Observed(
            job=replace(job, status=status) if records else job,
            pods=tuple(a_pod(s, node=node) for s, node in stay.items()),
            nodes={node: NodeFact(name=node) for node in self.rack_of},
            verdicts={node: a_verdict(node, NodeState.LEAVING) for node in self.left},
        )
        made = [a for a in plan(observed, NOW).actions if isinstance(a, CreatePod)]
        assert [a.slot for a in made] == sorted(moved or observed.slots.wanted)
        for action in made:
            self._send("POST", PODS, action.body)
        pods = [f"pod/{action.body['metadata']['name']}" for action in made]
        self.lab.kubectl("wait", "--for=condition=PodScheduled", *pods, "--timeout=50s")
        for action in made:
            found = self._send("GET", f"{PODS}/{action.body['metadata']['name']}", None)
            self.node_of[action.slot] = found["spec"]["nodeName"]

    def rack(self, slot: int) -> str:
        return self.rack_of[self.node_of[slot]]

    def remove(self) -> None:
        self.lab.kubectl("delete", names.PLURAL, "--all")
        self.lab.kubectl("delete", "pods", "--all", "--force", "--grace-period=0")
        self.lab.kubectl("delete", "nodes", *self.rack_of)

    def delete_pod(self, name: str) -> None:
        self.lab.kubectl("delete", "pod", name, "--force", "--grace-period=0")

    def _send(self, method: str, path: str, body: Any) -> dict[str, Any]:
        status, answer = self.server.send(method, path, body)
        assert status < 300, answer
        return answer


@pytest.fixture
def racks(lab: Lab, api_server: ApiServer) -> Iterator[Racks]:
    lab.kubectl("wait", "--for=create", "serviceaccount/default", "--timeout=50s")
    found = Racks(api_server, lab)
    try:
        for rack in "abc":
            for number in (1, 2):
                found.add(f"{rack}{number}", rack)
        yield found
    finally:
        found.remove()


def test_a_unit_is_placed_on_one_rack_and_stays_there_when_one_of_its_pods_moves(
    racks: Racks,
) -> None:
    job = racks.create_job("whole", replicas=4, cpu="2")
    racks.place(job)
    assert (racks.rack(0), racks.rack(2)) == (racks.rack(1), racks.rack(3))

    racks.delete_pod("whole-1-1")
    racks.place(job, {1: 2})
    assert racks.rack(1) not in (racks.rack(0), racks.rack(2)), "its own rack has no other node"

    racks.delete_pod("whole-1-2")
    racks.add("new", racks.rack(0))
    racks.place(job, {1: 3})
    assert racks.node_of[1] == "new"


def test_a_unit_is_placed_on_one_node_and_one_of_spares_on_one_of_another_rack(
    racks: Racks,
) -> None:
    racks.place(racks.create_job("small", replicas=2, spares=2, cpu="1"))
    assert racks.node_of[0] == racks.node_of[1]
    assert racks.node_of[2] == racks.node_of[3]
    assert racks.rack(0) != racks.rack(2)

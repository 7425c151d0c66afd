"""Lists of node leases: which jobs they wake, and what is reported where they are not allowed."""

import logging
from typing import Any, cast

import pytest

from everstep_contract import names
from everstep_operator import kube
from everstep_operator.kube import Kube
from everstep_operator.node_leases import DENIED_SECONDS, LIST_SECONDS, NAMESPACE, NodeLeases
from everstep_operator.world import Key, World

NODES = ("node-0", "node-1", "node-2")


def a_pod(name: str, node: str = "", avoids: str = "") -> dict[str, Any]:
    """A pod of the job with this name."""
    owner = {"kind": names.KIND, "name": name, "uid": f"uid-{name}", "controller": True}
    metadata = {
        "name": f"{name}-0-1", "namespace": "team", "uid": f"pod-{name}", "resourceVersion": "1",
        "ownerReferences": [owner],
    }  # fmt: skip
    field = {"key": "metadata.name", "operator": "NotIn", "values": [avoids]}
    terms = {"nodeSelectorTerms": [{"matchFields": [field]}]} if avoids else {}
    rule = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    return {"metadata": metadata, "spec": {"nodeName": node, "affinity": rule if avoids else {}}}


class Cluster:
    """The API server, with a clock of its own. Nodes that are not in `dead` renew at each list."""

    def __init__(self) -> None:
        self.now = 0.0
        self.dead: set[str] = set()
        self.error: kube.KubeError | None = None
        self.lists = 0
        self._renewed = dict.fromkeys(NODES, 0.0)

    async def list(
        self, kind: kube.Kind, namespace: str | None = None
    ) -> tuple[list[dict[str, Any]], str]:
        assert (kind, namespace) == (kube.LEASES, NAMESPACE)
        self.lists += 1
        if self.error is not None:
            raise self.error
        self._renewed |= {node: self.now for node in NODES if node not in self.dead}
        leases = [
            {"metadata": {"name": n}, "spec": {"renewTime": str(t), "leaseDurationSeconds": 40}}
            for n, t in self._renewed.items()
        ]
        return leases, "1"


class Operator:
    def __init__(self, *pods: dict[str, Any]) -> None:
        self.cluster, self.world = Cluster(), World()
        self.woken: list[Key] = []
        for pod in pods:
            self.world.pods.put(pod)
        self.leases = NodeLeases(
            cast(Kube, self.cluster), self.world, self.woken.append, lambda: self.cluster.now
        )

    async def pass_time(self, seconds: float) -> None:
        until = self.cluster.now + seconds
        while self.cluster.now < until:
            self.cluster.now += await self.leases.turn()


async def test_a_silent_node_wakes_the_jobs_on_it_and_its_return_those_that_shut_it_out() -> None:
    operator = Operator(
        a_pod("there", "node-1"), a_pod("elsewhere", "node-2"), a_pod("waits", avoids="node-1")
    )
    await operator.pass_time(12.0)
    assert operator.woken == []
    operator.cluster.dead = {"node-1"}
    await operator.pass_time(40.0)
    ((node, seconds),) = operator.leases.list_silent().items()
    assert node == "node-1"
    assert 40.0 <= seconds <= 40.0 + 2 * LIST_SECONDS
    assert sorted(operator.woken) == [("team", "there"), ("team", "waits")]
    operator.woken.clear()
    operator.cluster.dead = set()
    await operator.pass_time(LIST_SECONDS)
    assert operator.leases.list_silent() == {}
    assert sorted(operator.woken) == [("team", "there"), ("team", "waits")]


async def test_where_leases_may_not_be_listed_that_is_said_once_with_the_fix(
    caplog: pytest.LogCaptureFixture,
) -> None:
    operator = Operator(a_pod("there", "node-1"))
    operator.cluster.error = kube.Denied(403, "Forbidden", 'leases is forbidden: "list"')
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            assert await operator.leases.turn() == DENIED_SECONDS
    (said,) = caplog.messages
    assert "upgrade the chart" in said
    assert "recovery.nodeLostSeconds" in said
    assert "leases is forbidden" in said
    assert operator.leases.list_silent() == {}
    operator.cluster.error = None
    operator.cluster.dead = {"node-1"}
    await operator.pass_time(40.0)
    assert set(operator.leases.list_silent()) == {"node-1"}


async def test_an_api_server_that_is_away_is_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    operator = Operator(a_pod("there", "node-1"))
    operator.cluster.error = kube.Transient(503, "ServiceUnavailable", "away")
    with caplog.at_level(logging.WARNING):
        assert await operator.leases.turn() == LIST_SECONDS
    assert caplog.messages == []


async def test_without_a_pod_of_a_job_nothing_is_listed() -> None:
    operator = Operator()
    await operator.pass_time(30.0)
    assert operator.cluster.lists == 0

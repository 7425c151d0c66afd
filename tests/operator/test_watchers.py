"""A watch event wakes only what it concerns."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import kopf
import pytest

from everstep_contract import names
from everstep_operator.handlers import Watchers, use_address
from everstep_operator.scheduler import Scheduler
from everstep_operator.world import Key, World

Change = Callable[[dict[str, Any]], None]


class Woken:
    """Counts its calls, in place of the function that wakes the fleet loop."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> None:
        self.times += 1


async def _no_pass(key: tuple[str, str]) -> None:
    return None


def a_node() -> dict[str, Any]:
    ready = {"type": "Ready", "status": "True", "lastHeartbeatTime": "2026-01-01T00:00:00Z"}
    return {
        "metadata": {"name": "node-1", "uid": "u", "resourceVersion": "1"},
        "spec": {},
        "status": {"conditions": [ready], "capacity": {"nvidia.com/gpu": "8"}},
    }


def a_pod(job: str, *, avoids: str) -> dict[str, Any]:
    """A pod of this job that waits for a node other than the named one."""
    owner = {"kind": names.KIND, "name": job, "uid": "u", "controller": True}
    term = {"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": [avoids]}]}
    rule = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
    return {
        "metadata": {
            "name": f"{job}-0-1",
            "namespace": "team",
            "uid": "p",
            "ownerReferences": [owner],
        },
        "spec": {"affinity": {"nodeAffinity": rule}},
    }


def beat(node: dict[str, Any]) -> None:
    node["status"]["conditions"][0]["lastHeartbeatTime"] = "2026-01-01T00:05:00Z"


def cordon(node: dict[str, Any]) -> None:
    node["spec"]["unschedulable"] = True


def lose_a_gpu(node: dict[str, Any]) -> None:
    node["status"]["capacity"]["nvidia.com/gpu"] = "7"


def annotate(node: dict[str, Any]) -> None:
    node["metadata"]["annotations"] = {
        "everstep.dev/expected-gpus": '{"machine":"u","uuids":["a"]}'
    }


def test_a_node_that_comes_back_wakes_the_jobs_whose_waiting_pods_exclude_it() -> None:
    """Such a pod is then replaced: only a new one can use the node."""
    world, woken = World(), list[Key]()
    scheduler = cast(Scheduler, SimpleNamespace(wake=woken.append))
    watchers = Watchers(world, scheduler, Woken(), lambda quarantine: None)
    world.pods.put(a_pod("waits", avoids="node-1"))
    watchers.see_node({"type": "ADDED", "object": a_node()})
    assert woken == [("team", "waits")]


@pytest.mark.parametrize(
    ("change", "times"), [(beat, 0), (cordon, 1), (lose_a_gpu, 1), (annotate, 1)]
)
def test_a_heartbeat_starts_no_fleet_pass_and_a_change_does(change: Change, times: int) -> None:
    fleet = Woken()
    watchers = Watchers(World(), Scheduler(_no_pass), fleet, lambda quarantine: None)
    watchers.see_node({"type": "ADDED", "object": a_node()})
    assert fleet.times == 1
    changed = copy.deepcopy(a_node())
    changed["metadata"]["resourceVersion"] = "2"
    change(changed)
    watchers.see_node({"type": "MODIFIED", "object": changed})
    assert fleet.times == 1 + times
    watchers.see_node({"type": "DELETED", "object": changed})
    assert fleet.times == 2 + times


def test_the_watches_use_the_address_that_the_kubelet_gives() -> None:
    named = kopf.ConnectionInfo(server="https://kubernetes.default.svc", token="t")
    address = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}
    found = use_address(named, address)
    assert found is not None
    assert (found.server, found.token) == ("https://10.96.0.1:443", "t")
    found = use_address(named, {**address, "KUBERNETES_SERVICE_HOST": "fd00::1"})
    assert found is not None
    assert found.server == "https://[fd00::1]:443"
    assert use_address(named, {}) is named
    assert use_address(None, address) is None

"""When the API server has lost contact with all nodes that could run a job's pods."""

from typing import Any

import pytest

from everstep_operator.jobs.disruption import CONTROL_PLANE, TOGETHER_SECONDS, count_cut_off
from everstep_operator.jobs.stamps import to_stamp

GPU = "nvidia.com/gpu"
LOST_AT = 1e9
POD: dict[str, Any] = {"containers": [{"resources": {"requests": {GPU: "1"}}}]}


def a_node(
    name: str, *, ready: bool = True, gpus: int = 8, lost_at: float = LOST_AT, **labels: str
) -> dict[str, Any]:
    condition = {
        "type": "Ready",
        "status": "True" if ready else "Unknown",
        "message": "no heartbeat",
        "lastTransitionTime": to_stamp(lost_at),
    }
    return {
        "metadata": {"name": name, "labels": labels},
        "status": {"capacity": {GPU: str(gpus)}, "conditions": [condition]},
    }


AWAY = [a_node("node-0", ready=False), a_node("node-1", ready=False)]


def count(*others: dict[str, Any], pod: dict[str, Any] = POD) -> int:
    return count_cut_off([*AWAY, *others], pod, {"node-0"})


def test_all_nodes_with_the_devices_are_away() -> None:
    assert count() == 2
    assert count(a_node("cpu-0", gpus=0)) == 2, "no pod of the job could run there"
    assert count(a_node("node-2")) == 0


def test_one_node_that_is_away_among_others_that_are_ready_is_lost_alone() -> None:
    others = [a_node("node-1"), a_node("node-2")]
    assert count_cut_off([AWAY[0], *others], POD, {"node-0"}) == 0


def test_nodes_that_are_lost_at_different_times_have_failed_by_themselves() -> None:
    """A new node for the pod of the last one may come from an autoscaler."""
    assert count_cut_off(AWAY[:1], POD, {"node-0"}) == 0, "the only node"
    for apart, found in ((TOGETHER_SECONDS, 2), (TOGETHER_SECONDS + 1, 0)):
        other = a_node("node-1", ready=False, lost_at=LOST_AT - apart)
        assert count_cut_off([AWAY[0], other], POD, {"node-0"}) == found
    earlier = a_node("node-2", ready=False, lost_at=LOST_AT - 86_400)
    assert count(earlier) == 3, "it waits for its repair since yesterday"


def test_a_cordoned_node_shows_that_nodes_of_its_kind_can_be_reached() -> None:
    assert count({**a_node("node-2"), "spec": {"unschedulable": True}}) == 0


def test_only_nodes_with_the_labels_that_the_pod_requires_count() -> None:
    pod = {**POD, "nodeSelector": {"pool": "a"}}
    away = a_node("node-3", ready=False, pool="a")
    assert count(away, a_node("node-2", pool="b"), pod=pod) == 2
    assert count(a_node("node-2", pool="a"), pod=pod) == 0


@pytest.mark.parametrize(("tolerations", "found"), [([], 2), ([{"key": CONTROL_PLANE}], 0)])
def test_a_control_plane_node_counts_only_for_pods_that_tolerate_it(
    tolerations: list[dict[str, str]], found: int
) -> None:
    pod = {"containers": [], "tolerations": tolerations}
    assert count(a_node("cp-0", gpus=0, **{CONTROL_PLANE: ""}), pod=pod) == found


def test_the_nodes_of_the_job_always_count() -> None:
    bare = [{**node, "status": {"conditions": node["status"]["conditions"]}} for node in AWAY]
    assert count_cut_off(bare, POD, {"node-0", "node-1"}) == 2

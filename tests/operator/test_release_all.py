"""`release-all`: what it undoes, what it leaves untouched, and what it reports when it fails."""

from typing import Any

import pytest

from everstep_contract import names
from everstep_operator import kube, release_all
from everstep_operator.election import Alone
from fleet_given import Fleet
from toy_cluster import ToyCluster

OTHERS_TAINT = {"key": "maintenance", "value": "soon", "effect": "NoSchedule"}


async def a_fleet(**changes: Any) -> Fleet:
    fleet = Fleet()
    fleet.cluster.add_nodes(3, **changes)
    return await fleet.break_("node-1").settle()


async def release(cluster: ToyCluster) -> int:
    port: Any = cluster
    cluster.writes.clear()
    return await release_all.run(port, port, Alone())


async def test_a_node_under_our_mark_is_given_back() -> None:
    fleet = await a_fleet(taints=[OTHERS_TAINT], annotations={"theirs": "stays"})
    assert fleet.cluster.nodes()["node-1"].tainted
    assert await release(fleet.cluster) == 0
    node = fleet.cluster.nodes()["node-1"]
    assert (node.unschedulable, node.taints, node.mark) == (False, (OTHERS_TAINT,), None)
    assert fleet.cluster.node("node-1")["metadata"]["annotations"]["theirs"] == "stays"
    assert fleet.cluster.quarantines() == ()


async def test_a_node_that_another_had_cordoned_stays_so() -> None:
    fleet = await a_fleet(unschedulable=True)
    await release(fleet.cluster)
    node = fleet.cluster.nodes()["node-1"]
    assert (node.unschedulable, node.tainted) == (True, False)


async def test_nodes_without_our_marks_are_not_touched() -> None:
    cluster = ToyCluster()
    cluster.add_nodes(2, unschedulable=True, taints=[OTHERS_TAINT])
    assert await release(cluster) == 0
    assert cluster.writes == []


async def test_what_people_answered_stays_on_the_node() -> None:
    fleet = await a_fleet()
    await fleet.delete()
    await fleet.break_("node-1", code=79, at=fleet.now).settle()
    await release(fleet.cluster)
    assert fleet.cluster.nodes()["node-1"].answered


async def test_marks_are_undone_though_the_crd_is_absent() -> None:
    fleet = await a_fleet()
    fleet.cluster.crd = "missing"
    assert await release(fleet.cluster) == 0
    assert not fleet.cluster.nodes()["node-1"].unschedulable


async def test_a_mark_that_cannot_be_read_is_undone_by_what_the_quarantine_says() -> None:
    fleet = await a_fleet()
    broken = {"metadata": {"annotations": {names.ANNOTATION_CORDONED: "{"}}}
    fleet.cluster.change_node("node-1", broken)
    await release(fleet.cluster)
    node = fleet.cluster.node("node-1")
    assert not node["spec"].get("unschedulable")
    assert names.ANNOTATION_CORDONED not in node["metadata"]["annotations"]


async def test_without_a_readable_mark_a_cordon_is_not_taken_for_ours(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    fleet = await a_fleet()
    broken = {"metadata": {"annotations": {names.ANNOTATION_CORDONED: "{"}}}
    fleet.cluster.change_node("node-1", broken)
    fleet.cluster.crd = "missing"
    await release(fleet.cluster)
    assert fleet.cluster.nodes()["node-1"].unschedulable
    assert "kubectl uncordon node-1" in caplog.text


async def test_cut_anywhere_and_begun_anew_it_comes_to_the_same_end() -> None:
    done = await a_fleet()
    await release(done.cluster)
    for cut in range(1, 3):
        fleet = await a_fleet()
        port: Any = CutAfter(fleet.cluster, cut)
        with pytest.raises(release_all.NotReleased):
            await release_all.run(port, port, Alone())
        await release(fleet.cluster)
        assert fleet.cluster.shape() == done.cluster.shape()


class CutAfter:
    """The toy cluster. The patch or delete number `writes` and all later ones get no answer."""

    def __init__(self, cluster: ToyCluster, writes: int) -> None:
        self._cluster, self._end = cluster, len(cluster.writes) + writes - 1

    def __getattr__(self, name: str) -> Any:
        if name in ("patch", "delete") and len(self._cluster.writes) >= self._end:
            raise kube.Transient(0, "ClientError", "no answer")
        return getattr(self._cluster, name)


async def test_what_is_not_allowed_is_said_with_what_to_do_by_hand() -> None:
    class Forbidden(CutAfter):
        def __getattr__(self, name: str) -> Any:
            if name == "patch":
                raise kube.Denied(403, "Forbidden", "may not patch nodes")
            return getattr(self._cluster, name)

    fleet = await a_fleet()
    port: Any = Forbidden(fleet.cluster, 0)
    with pytest.raises(
        release_all.NotReleased, match=r"may not patch nodes.*kubectl uncordon NODE"
    ):
        await release_all.run(port, port, Alone())


@pytest.mark.parametrize("down", [False, True])
async def test_a_node_that_may_not_be_changed_holds_up_no_other_and_no_quarantine_is_deleted(
    down: bool,
) -> None:
    fleet = await a_fleet()
    fleet.cluster.webhook_down = down
    await fleet.break_("node-2", at=fleet.now).settle()
    fleet.cluster.refused.add("node-1")
    with pytest.raises(release_all.NotReleased, match="nodes: node-1"):
        await release(fleet.cluster)
    assert [n.name for n in fleet.cluster.nodes().values() if n.unschedulable] == ["node-1"]
    assert len(fleet.cluster.quarantines()) == 2

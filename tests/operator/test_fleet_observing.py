"""`--observe-only` reports everything and changes only nodes that an administrator gives back."""

from everstep_operator import kube
from everstep_operator.fleet.actions import PatchNode, Tell
from everstep_operator.fleet.budget import Budget
from everstep_operator.fleet.memory import REFUSED_SECONDS
from everstep_operator.fleet.observed import Policy
from fleet_given import Fleet


def a_fleet(nodes: int = 4, budget: int = 2) -> Fleet:
    fleet = Fleet(policy=Policy(budget=Budget(number=budget)), observe_only=True)
    fleet.cluster.add_nodes(nodes)
    return fleet


async def told(fleet: Fleet) -> dict[str, Tell]:
    actions = await fleet.step()
    assert all(isinstance(action, Tell) for action in actions)
    return {action.node: action for action in actions if isinstance(action, Tell)}


async def an_armed_fleet_that_is_disarmed() -> Fleet:
    fleet = a_fleet()
    fleet.observe_only = False
    await fleet.break_("node-1").settle()
    fleet.observe_only = True
    fleet.cluster.writes.clear()
    return fleet


async def test_a_bad_node_is_told_of_with_what_would_be_done_and_how_to_arm() -> None:
    fleet = a_fleet().break_("node-1")
    message = (await told(fleet))["node-1"].message
    assert "Everstep does not cordon it, because it is in observe-only mode" in message
    assert "observeOnly: false" in message
    assert fleet.cluster.writes == []
    assert fleet.cluster.reasons() == ["GpuFatalXid"]


async def test_the_same_is_written_once_however_many_passes_there_are() -> None:
    fleet = a_fleet().break_("node-1")
    for _ in range(5):
        await fleet.step()
    assert len(fleet.cluster.events) == 1


async def test_what_the_budget_would_not_admit_is_told_apart() -> None:
    fleet = a_fleet(budget=1).break_("node-1").break_("node-2", at=1_000_009.0)
    found = await told(fleet)
    assert "Everstep does not cordon it" in found["node-1"].message
    assert "the cordon budget would be spent" in found["node-2"].message


async def test_a_gpu_that_is_seen_for_the_first_time_writes_no_annotation() -> None:
    fleet = a_fleet()
    fleet.gpus = {"node-0": frozenset({"GPU-a", "GPU-b"})}
    assert await told(fleet) == {}
    assert fleet.cluster.nodes()["node-0"].expected == ()


async def test_marks_of_armed_days_stand() -> None:
    fleet = await an_armed_fleet_that_is_disarmed()
    for _ in range(5):
        await fleet.step()
    assert fleet.cluster.writes == []
    assert fleet.cluster.nodes()["node-1"].tainted


async def test_a_mark_that_others_removed_is_not_put_back() -> None:
    fleet = await an_armed_fleet_that_is_disarmed()
    fleet.cluster.change_node("node-1", {"spec": {"taints": None, "unschedulable": None}})
    fleet.now += 600
    await fleet.step()
    assert fleet.cluster.writes == []


async def test_deleting_the_quarantine_of_armed_days_releases_its_node() -> None:
    fleet = await an_armed_fleet_that_is_disarmed()
    await fleet.heal("node-1").delete()
    node = fleet.cluster.nodes()["node-1"]
    assert (node.unschedulable, node.tainted, node.mark) == (False, False, None)
    assert node.answered


async def test_a_release_that_is_refused_is_tried_again_after_a_pause() -> None:
    fleet = await an_armed_fleet_that_is_disarmed()
    fleet.cluster.refused |= fleet.cluster.nodes().keys()
    await fleet.delete()
    assert not any(isinstance(action, PatchNode) for action in fleet.plan().actions)
    fleet.cluster.refused.clear()
    await fleet.settle(REFUSED_SECONDS)
    assert not any(node.tainted for node in fleet.cluster.nodes().values())


async def test_a_mark_without_its_object_is_told_of_with_the_commands_that_undo_it() -> None:
    fleet = await an_armed_fleet_that_is_disarmed()
    fleet.restart()
    for name in [q.name for q in fleet.cluster.quarantines()]:
        fleet.cluster.remove(kube.QUARANTINES, name)
    found = (await told(fleet))["node-1"]
    assert found.reason == "QuarantineMarkStands"
    assert "kubectl uncordon node-1; kubectl taint node node-1" in found.message


async def test_evidence_that_was_answered_is_not_told_of_again() -> None:
    fleet = await an_armed_fleet_that_is_disarmed()
    await fleet.delete()
    assert await told(fleet) == {}


async def test_armed_again_the_node_is_taken() -> None:
    fleet = a_fleet().break_("node-1")
    await fleet.step()
    fleet.observe_only = False
    await fleet.settle()
    assert fleet.cluster.nodes()["node-1"].tainted

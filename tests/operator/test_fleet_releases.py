"""NodeQuarantines that have disappeared: deleted by people, or lost with their CRD or a backup."""

import pytest

from everstep_operator import kube
from everstep_operator.fleet.budget import Budget
from everstep_operator.fleet.memory import with_deleted
from everstep_operator.fleet.observed import Policy
from everstep_operator.fleet.plan import plan
from everstep_operator.quarantines import Quarantine
from fleet_given import START, Fleet


async def a_rack(count: int = 5) -> Fleet:
    """A fleet of eight nodes, `count` of them in quarantine."""
    fleet = Fleet(policy=Policy(budget=Budget(number=8)))
    fleet.cluster.add_nodes(8)
    for index in range(count):
        fleet.break_(f"node-{index}")
    return await fleet.settle()


def cordoned(fleet: Fleet) -> list[str]:
    return [n.name for n in fleet.cluster.nodes().values() if n.unschedulable]


def remove_all(fleet: Fleet) -> list[Quarantine]:
    gone = list(fleet.cluster.quarantines())
    for quarantine in gone:
        fleet.cluster.remove(kube.QUARANTINES, quarantine.name)
    return gone


def conditions(fleet: Fleet) -> set[tuple[str, str, str]]:
    objects = fleet.cluster._of("nodequarantines")
    return {
        (c["type"], c["status"], c["reason"])
        for obj in objects
        for c in (obj.get("status") or {}).get("conditions", ())
    }


async def test_all_quarantines_of_a_repaired_rack_deleted_at_once_release_its_nodes() -> None:
    fleet = await (await a_rack()).delete()
    assert cordoned(fleet) == []
    assert fleet.cluster.quarantines() == ()
    assert all(fleet.cluster.nodes()[f"node-{i}"].answered for i in range(5))
    assert fleet.cluster.reasons().count("NodeReleased") == 5


async def test_deletions_that_the_watch_tells_of_late_release_as_well() -> None:
    fleet = await a_rack()
    gone = remove_all(fleet)
    await fleet.settle(5)
    assert len(cordoned(fleet)) == 5
    for quarantine in gone:
        fleet.memory = with_deleted(fleet.memory, quarantine)
    await fleet.settle()
    assert cordoned(fleet) == []


async def test_deletions_that_are_reported_between_a_list_and_its_plan_release_as_well() -> None:
    """The list still shows the objects. It must not make the operator forget the reports."""
    fleet = await a_rack()
    listed = fleet.observe()
    for quarantine in remove_all(fleet):
        fleet.memory = with_deleted(fleet.memory, quarantine)
    fleet.memory = plan(listed, fleet.memory, fleet.policy, fleet.now).memory
    await fleet.settle(15)
    assert (cordoned(fleet), fleet.cluster.quarantines()) == ([], ())


async def test_many_that_vanish_without_a_word_are_put_back_and_say_why() -> None:
    """A list lacks objects because etcd was restored to an older state, or its storage lost a part."""
    fleet = await (await a_rack()).delete(observed=False)
    assert len(cordoned(fleet)) == 5
    await fleet.settle(15)
    assert len(cordoned(fleet)) == 5
    assert len(fleet.cluster.quarantines()) == 5
    assert "ManyQuarantinesLost" in fleet.cluster.reasons()
    assert conditions(fleet) == {("PutBack", "True", "ManyQuarantinesLost")}
    assert fleet.verdicts()["node-0"].quarantined


async def test_a_crash_while_many_are_put_back_releases_none_of_the_rest() -> None:
    fleet = await a_rack()
    remove_all(fleet)
    await fleet.step()
    fleet.now += 15
    await fleet.step(only=3)
    await fleet.settle(15)
    assert (len(cordoned(fleet)), len(fleet.cluster.quarantines())) == (5, 5)


async def test_what_was_put_back_can_be_deleted_for_good() -> None:
    fleet = await (await a_rack()).delete(observed=False)
    await fleet.settle(15)
    await fleet.delete()
    assert (cordoned(fleet), fleet.cluster.quarantines()) == ([], ())


async def test_a_crd_that_was_deleted_and_made_anew_at_once_releases_nothing() -> None:
    """Deleting the CRD deletes every object, each with an ordinary event."""
    fleet = await a_rack()
    fleet.now += 100
    fleet.cluster.crd_created_at = fleet.now
    await fleet.delete()
    assert len(cordoned(fleet)) == 5
    assert len(fleet.cluster.quarantines()) == 5
    assert conditions(fleet) == {("PutBack", "True", "DefinitionReplaced")}
    await fleet.delete()
    assert cordoned(fleet) == []


async def test_even_one_quarantine_that_went_with_its_crd_is_put_back() -> None:
    fleet = await a_rack(1)
    fleet.now += 100
    fleet.cluster.crd_created_at = fleet.now
    await fleet.delete()
    assert cordoned(fleet) == ["node-0"]
    assert len(fleet.cluster.quarantines()) == 1


async def test_a_crd_that_is_being_deleted_releases_none_of_many() -> None:
    fleet = await a_rack()
    fleet.cluster.crd = "terminating"
    await fleet.delete()
    await fleet.settle(60)
    assert len(cordoned(fleet)) == 5
    fleet.now += 100
    fleet.cluster.crd, fleet.cluster.crd_created_at = "served", fleet.now
    await fleet.settle()
    assert len(fleet.cluster.quarantines()) == 5


async def test_without_the_right_to_look_at_the_crd_many_deletions_are_a_loss() -> None:
    fleet = await a_rack()
    fleet.cluster.crd_created_at = None
    await fleet.delete()
    assert len(cordoned(fleet)) == 5
    await fleet.settle(15)
    assert conditions(fleet) == {("PutBack", "True", "ManyQuarantinesLost")}
    await fleet.delete(*[q.name for q in fleet.cluster.quarantines()][:2])
    assert len(cordoned(fleet)) == 3


async def test_a_standby_that_saw_the_deletions_releases_once_it_leads() -> None:
    fleet = await a_rack()
    gone = remove_all(fleet)
    fleet.restart()
    for quarantine in gone:
        fleet.memory = with_deleted(fleet.memory, quarantine)
    await fleet.settle()
    assert cordoned(fleet) == []


async def test_over_budget_quarantines_that_were_lost_come_back_as_they_were() -> None:
    fleet = Fleet(policy=Policy(budget=Budget(number=1)))
    fleet.cluster.add_nodes(8)
    for index in range(6):
        fleet.break_(f"node-{index}", at=START + index / 10)
    await fleet.settle()
    before = fleet.cluster.shape()
    await fleet.delete(observed=False)
    await fleet.settle(15)
    assert fleet.cluster.shape() == before


@pytest.mark.parametrize("late", [False, True])
async def test_a_few_that_vanish_without_an_event_count_as_deleted(late: bool) -> None:
    """A watch that was cut reports nothing, but the list is fresh and the CRD is the same."""
    fleet = await a_rack(2)
    fleet.now += 50 if late else 0
    await fleet.delete(observed=False)
    assert cordoned(fleet) == []


async def test_deleted_quarantines_that_a_finalizer_holds_release_their_nodes_and_stay_deleted() -> (
    None
):
    fleet = await a_rack()
    for quarantine in fleet.cluster.quarantines():
        held = fleet.cluster.objects["nodequarantines", quarantine.name]
        held["metadata"]["deletionTimestamp"] = "2026-11-21T10:00:00Z"
    await fleet.settle(15)
    assert cordoned(fleet) == []
    assert "ManyQuarantinesLost" not in fleet.cluster.reasons()
    remove_all(fleet)
    await fleet.settle(15)
    assert (fleet.cluster.quarantines(), cordoned(fleet)) == ((), [])


async def test_a_new_leader_releases_the_node_of_a_deleted_quarantine_that_a_finalizer_holds() -> (
    None
):
    fleet = await a_rack(1)
    (quarantine,) = fleet.cluster.quarantines()
    held = fleet.cluster.objects["nodequarantines", quarantine.name]
    held["metadata"]["deletionTimestamp"] = "2026-11-21T10:00:00Z"
    await fleet.restart().settle(15)
    assert cordoned(fleet) == []
    assert fleet.cluster.reasons().count("NodeReleased") == 1

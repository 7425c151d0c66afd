"""Verdicts, nodes and quarantines → cordons, releases, and what stays untouched."""

import pytest

from everstep_contract import names
from everstep_operator import kube
from everstep_operator.evidence import MISSING
from everstep_operator.fleet.actions import CreateQuarantine, Tell
from everstep_operator.fleet.apply import apply_plan
from everstep_operator.fleet.budget import Budget, parse_budget
from everstep_operator.fleet.marks import EXPECTED_LIMIT
from everstep_operator.fleet.memory import REFUSED_SECONDS
from everstep_operator.fleet.observed import Policy
from everstep_operator.quarantines import EVIDENCE_LIMIT
from everstep_operator.values import NodeState
from fleet_given import START, Fleet
from toy_cluster import a_node_object

OTHERS_TAINT = {"key": "maintenance", "value": "soon", "effect": "NoSchedule"}


def a_fleet(nodes: int = 4, budget: int = 2, **changes: object) -> Fleet:
    fleet = Fleet(policy=Policy(budget=Budget(number=budget)))
    fleet.cluster.add_nodes(nodes, **changes)
    return fleet


async def a_quarantined_node(**changes: object) -> Fleet:
    return await a_fleet(**changes).break_("node-1").settle()


def cordoned(fleet: Fleet) -> list[str]:
    return [n.name for n in fleet.cluster.nodes().values() if n.unschedulable]


async def test_a_quiet_fleet_is_not_touched() -> None:
    fleet = await a_fleet().settle()
    assert fleet.cluster.writes == []


async def test_a_bad_node_is_recorded_cordoned_tainted_and_annotated() -> None:
    fleet = await a_quarantined_node()
    node = fleet.cluster.nodes()["node-1"]
    (quarantine,) = fleet.cluster.quarantines()
    assert (node.unschedulable, node.tainted) == (True, True)
    assert node.mark is not None
    assert (node.mark.quarantine, node.mark.cordoned) == (quarantine.name, True)
    assert (quarantine.state, quarantine.cordon) == ("Quarantined", True)
    assert quarantine.incident == node.mark.incident
    assert fleet.cluster.reasons() == ["GpuFatalXid", "NodeQuarantined"]
    assert cordoned(fleet) == ["node-1"]


async def test_once_done_nothing_is_written_any_more() -> None:
    fleet = await a_quarantined_node()
    fleet.cluster.writes.clear()
    await fleet.settle(100)
    assert fleet.cluster.writes == []


async def test_the_count_comes_first_and_alone() -> None:
    fleet = a_fleet().break_("node-1")
    first = fleet.plan().actions
    assert [type(action) for action in first] == [CreateQuarantine]
    await fleet.step()
    assert not cordoned(fleet)
    await fleet.step()
    assert cordoned(fleet) == ["node-1"]


async def test_the_incident_has_the_same_name_in_every_pass_and_every_life() -> None:
    one, two = a_fleet().break_("node-1"), a_fleet().break_("node-1")
    two.now += 50
    names_of = [[a.quarantine.name for a in f.plan().actions] for f in (one, two)]  # type: ignore[union-attr]
    assert names_of[0] == names_of[1]


async def test_a_restarted_operator_meets_its_own_quarantine_and_makes_no_second() -> None:
    fleet = (await a_quarantined_node()).restart()
    fleet.cluster.writes.clear()
    await fleet.settle()
    assert fleet.cluster.writes == []


async def test_beyond_the_budget_nodes_are_recorded_but_not_cordoned() -> None:
    fleet = a_fleet(budget=2)
    for index in range(4):
        fleet.break_(f"node-{index}", at=START + index / 10)
    await fleet.settle()
    assert cordoned(fleet) == ["node-0", "node-1"]
    states = sorted(q.state for q in fleet.cluster.quarantines())
    assert states == ["OverBudget", "OverBudget", "Quarantined", "Quarantined"]
    assert fleet.cluster.reasons().count("QuarantineBudgetExceeded") == 2


async def test_what_is_gone_gets_the_budget_before_what_is_only_failing() -> None:
    fleet = a_fleet(budget=1).break_("node-1")
    fleet.break_("node-3", kind=MISSING, state=NodeState.GONE, at=START + 0.9)
    await fleet.settle()
    assert cordoned(fleet) == ["node-3"]


async def test_room_in_the_budget_admits_who_waited_if_it_is_still_at_fault() -> None:
    fleet = a_fleet(budget=1).break_("node-1").break_("node-2", at=START + 0.5)
    await fleet.settle()
    first = next(q for q in fleet.cluster.quarantines() if q.cordon)
    await fleet.delete(first.name)
    assert cordoned(fleet) == ["node-2"]
    assert "QuarantineAdmitted" in fleet.cluster.reasons()


async def test_a_bad_machine_that_registers_again_is_cordoned_even_beyond_the_budget() -> None:
    fleet = await a_fleet(budget=1).break_("node-1").settle()
    fleet.cluster.remove(kube.NODES, "node-1")
    await fleet.break_("node-2", at=fleet.now).settle()
    assert cordoned(fleet) == ["node-2"], "a node that is not there takes no place"
    fleet.cluster.add(kube.NODES, a_node_object("node-1"))
    await fleet.settle()
    assert cordoned(fleet) == ["node-1", "node-2"]


async def test_a_new_leader_admits_who_waited_although_the_exporter_shows_another_fault_now() -> (
    None
):
    """To raise the budget is the documented remedy, and it restarts the operator."""
    fleet = a_fleet(budget=1).break_("node-1").break_("node-2", at=START + 0.5)
    await fleet.settle()
    fleet.hide("node-2").restart()
    fleet.policy = Policy(budget=Budget(number=2))
    await fleet.settle()
    assert cordoned(fleet) == ["node-1", "node-2"]


async def test_a_new_leader_admits_nobody_whose_gpu_was_reset_while_it_waited() -> None:
    fleet = a_fleet(budget=1).break_("node-1").break_("node-2", at=START + 0.5)
    await fleet.settle()
    fleet.heal("node-2").restart()
    fleet.policy = Policy(budget=Budget(number=2))
    await fleet.settle()
    assert cordoned(fleet) == ["node-1"]
    await fleet.break_("node-2", at=fleet.now).settle()
    assert cordoned(fleet) == ["node-1", "node-2"], "the same fault again"


async def test_a_new_leader_admits_nobody_whose_evidence_ended_with_the_boot() -> None:
    fleet = a_fleet(budget=2).break_("node-1").break_("node-2", at=START + 0.5)
    fleet.policy = Policy(budget=Budget(number=1))
    await fleet.settle()
    waiting = next(q for q in fleet.cluster.quarantines() if not q.cordon)
    reboot = {"status": {"nodeInfo": {"bootID": "boot-2"}}}
    fleet.heal("node-2").restart().cluster.change_node(waiting.node, reboot)
    fleet.policy = Policy(budget=Budget(number=2))
    await fleet.settle()
    assert cordoned(fleet) == ["node-1"], "its evidence ended with the boot"


async def test_a_new_leader_admits_nobody_whose_gpu_was_swapped_while_it_waited() -> None:
    fleet = a_fleet(budget=1).break_("node-1")
    fleet.break_("node-2", kind="row-remap-failure", at=START + 0.5)
    fleet.gpus = {"node-2": frozenset({"GPU-a", "GPU-b"})}
    await fleet.settle()
    fleet.gpus = {"node-2": frozenset({"GPU-b", "GPU-c"})}
    fleet.hide("node-2").restart()
    fleet.policy = Policy(budget=Budget(number=2))
    await fleet.settle()
    assert cordoned(fleet) == ["node-1"]


async def test_who_waited_and_was_healed_is_not_cordoned_afterwards() -> None:
    fleet = a_fleet(budget=1).break_("node-1").break_("node-2", at=START + 0.5)
    await fleet.settle()
    fleet.heal("node-2")
    await fleet.delete(next(q.name for q in fleet.cluster.quarantines() if q.cordon))
    assert cordoned(fleet) == []


@pytest.mark.parametrize(
    ("text", "gpu_nodes", "limit"),
    [
        ("10%", 4, 1),
        ("10%", 39, 3),
        ("50%", 8, 4),
        ("29%", 100, 29),
        ("2", 100, 2),
        ("0", 100, 1),
        ("0%", 9, 1),
    ],
)
def test_the_budget_is_a_share_or_a_number_and_at_least_one(
    text: str, gpu_nodes: int, limit: int
) -> None:
    assert parse_budget(text).limit(gpu_nodes) == limit


async def test_deleting_the_quarantine_releases_the_node_and_answers_its_evidence() -> None:
    fleet = await (await a_quarantined_node()).delete()
    node = fleet.cluster.nodes()["node-1"]
    assert (node.unschedulable, node.tainted, node.mark) == (False, False, None)
    assert [e.code for e in node.answered] == [64]
    assert fleet.cluster.quarantines() == ()
    assert fleet.cluster.reasons()[-1] == "NodeReleased"


async def test_the_same_old_evidence_does_not_take_a_released_node_again() -> None:
    fleet = await (await a_quarantined_node()).delete()
    await fleet.settle(30)
    await fleet.restart().settle(30)
    assert cordoned(fleet) == []
    assert fleet.cluster.quarantines() == ()


@pytest.mark.parametrize("codes", [(64, 79), (64, 79, 119), (62, 64, 74, 79, 119)])
async def test_one_release_answers_more_evidence_than_a_quarantine_holds(
    codes: tuple[int, ...],
) -> None:
    fleet = a_fleet()
    for gpu in range(8):
        for code in codes:
            fleet.break_("node-1", gpu=f"GPU-{gpu}", code=code)
    await fleet.settle()
    assert cordoned(fleet) == ["node-1"]
    await fleet.delete()
    await fleet.settle(30)
    assert cordoned(fleet) == []
    await fleet.break_("node-1", gpu="GPU-9", at=fleet.now).settle()
    assert cordoned(fleet) == ["node-1"], "new evidence counts"


async def test_evidence_of_an_earlier_boot_takes_up_no_room_in_a_quarantine() -> None:
    fleet = a_fleet()
    for gpu in range(EVIDENCE_LIMIT):
        fleet.break_("node-1", gpu=f"GPU-{gpu}")
    await fleet.settle()
    reboot = {"status": {"nodeInfo": {"bootID": "boot-2"}}}
    fleet.heal("node-1").cluster.change_node("node-1", reboot)
    await fleet.break_("node-1", gpu="GPU-x", at=fleet.now).settle()
    (quarantine,) = fleet.cluster.quarantines()
    assert quarantine.evidence[-1].gpu == "GPU-x", "who reads the object learns of the new fault"
    await fleet.break_("node-1", gpu="GPU-y", at=fleet.now - 0.1).delete()
    assert [e.gpu for e in fleet.cluster.nodes()["node-1"].answered] == ["GPU-x"]
    assert cordoned(fleet) == ["node-1"], "nobody could know of the newest fault"


async def test_new_evidence_takes_a_released_node_again() -> None:
    fleet = await (await a_quarantined_node()).delete()
    await fleet.break_("node-1", at=fleet.now).settle()
    assert cordoned(fleet) == ["node-1"]


async def test_a_release_answers_the_newest_occurrence_of_what_it_knew() -> None:
    fleet = await a_quarantined_node()
    fleet.heal("node-1").break_("node-1", at=fleet.now)
    await fleet.settle()
    await fleet.delete()
    assert cordoned(fleet) == []


async def test_releasing_a_node_with_a_missing_gpu_means_to_run_without_it() -> None:
    fleet = a_fleet()
    fleet.gpus = {"node-1": frozenset({"GPU-a", "GPU-b"})}
    await fleet.settle()
    fleet.gpus = {"node-1": frozenset({"GPU-b"})}
    await fleet.break_("node-1", kind=MISSING, state=NodeState.GONE).settle()
    assert fleet.cluster.nodes()["node-1"].expected == ("GPU-a", "GPU-b")
    await fleet.delete()
    assert fleet.cluster.nodes()["node-1"].expected == ("GPU-b",)


async def test_releasing_a_node_after_its_reboot_keeps_the_gpu_that_came_back() -> None:
    fleet = a_fleet()
    fleet.gpus = {"node-1": frozenset({"GPU-a", "GPU-b"})}
    await fleet.settle()
    await fleet.break_("node-1", kind=MISSING, state=NodeState.GONE).settle()
    fleet.heal("node-1").cluster.change_node("node-1", {"status": {"nodeInfo": {"bootID": "2"}}})
    fleet.cluster.writes.clear()
    await fleet.delete()
    assert cordoned(fleet) == []
    assert fleet.cluster.nodes()["node-1"].expected == ("GPU-a", "GPU-b")
    assert fleet.cluster.writes == ["patch nodes node-1"]


async def test_a_node_cordoned_by_another_stays_cordoned_when_we_release_it() -> None:
    fleet = await a_quarantined_node(unschedulable=True)
    await fleet.delete()
    node = fleet.cluster.nodes()["node-1"]
    assert (node.unschedulable, node.tainted, node.mark) == (True, False, None)


async def test_taints_of_others_come_and_stay_and_go_as_they_like() -> None:
    fleet = await a_quarantined_node(taints=[OTHERS_TAINT])
    keys = [t["key"] for t in fleet.cluster.nodes()["node-1"].taints]
    assert keys == ["maintenance", names.TAINT_QUARANTINE]
    await fleet.delete()
    assert fleet.cluster.nodes()["node-1"].taints == (OTHERS_TAINT,)


async def test_a_manual_cordon_of_a_sound_node_is_left_alone() -> None:
    fleet = await a_quarantined_node()
    fleet.cluster.change_node("node-2", {"spec": {"unschedulable": True}})
    await fleet.settle()
    await fleet.delete()
    assert cordoned(fleet) == ["node-2"]


@pytest.mark.parametrize(
    "damage",
    [
        {"spec": {"unschedulable": None}},
        {"spec": {"taints": []}},
        {"spec": {"taints": [], "unschedulable": False}},
        {"metadata": {"annotations": {names.ANNOTATION_CORDONED: None}}},
    ],
)
async def test_our_marks_are_put_back_where_others_removed_them(damage: dict[str, object]) -> None:
    fleet = await a_quarantined_node()
    fleet.cluster.change_node("node-1", damage)
    await fleet.settle()
    node = fleet.cluster.nodes()["node-1"]
    assert (node.unschedulable, node.tainted, node.mark is not None) == (True, True, True)
    await fleet.delete()
    assert cordoned(fleet) == []


async def test_repairs_do_not_become_a_shouting_match() -> None:
    fleet = await a_quarantined_node()
    fleet.cluster.writes.clear()
    for _ in range(100):
        fleet.cluster.change_node("node-1", {"spec": {"unschedulable": None}})
        await fleet.step()
        fleet.now += 1
    assert len(fleet.cluster.writes) == 4


async def test_a_clock_that_is_set_back_delays_neither_a_repair_nor_another_try() -> None:
    fleet = await a_quarantined_node()
    fleet.cluster.change_node("node-1", {"spec": {"unschedulable": None}})
    fleet.break_("node-2", at=fleet.now)
    fleet.cluster.refused.add("node-2")
    await fleet.settle()
    assert cordoned(fleet) == ["node-1"]
    fleet.now -= 3600
    fleet.cluster.refused.clear()
    fleet.cluster.change_node("node-1", {"spec": {"unschedulable": None}})
    await fleet.settle()
    assert cordoned(fleet) == ["node-1", "node-2"]


async def test_a_mark_whose_object_was_deleted_while_we_were_away_is_put_back() -> None:
    fleet = await a_quarantined_node()
    (before,) = fleet.cluster.quarantines()
    fleet.cluster.remove(kube.QUARANTINES, before.name)
    await fleet.restart().settle()
    (after,) = fleet.cluster.quarantines()
    assert (after.name, after.incident, after.evidence) == (before.name, before.incident, before.evidence)  # fmt: skip
    assert cordoned(fleet) == ["node-1"]
    assert "QuarantineRestored" in fleet.cluster.reasons()
    await fleet.delete()
    assert cordoned(fleet) == []


async def test_a_crd_that_is_being_deleted_releases_nothing() -> None:
    fleet = await a_quarantined_node()
    fleet.cluster.crd = "terminating"
    await fleet.delete()
    assert cordoned(fleet) == ["node-1"]
    fleet.cluster.crd = "missing"
    await fleet.step()
    assert cordoned(fleet) == ["node-1"]


async def test_a_missing_crd_is_reported_and_nothing_is_done() -> None:
    fleet = a_fleet().break_("node-1")
    fleet.cluster.crd = "missing"
    await fleet.step()
    assert fleet.cluster.writes == []
    assert fleet.cluster.reasons() == ["QuarantinesUnreadable"]


async def test_an_over_budget_quarantine_that_is_deleted_counts_as_answered() -> None:
    fleet = a_fleet(budget=1).break_("node-1").break_("node-2", at=START + 0.5)
    await fleet.settle()
    await fleet.delete(next(q.name for q in fleet.cluster.quarantines() if not q.cordon))
    assert [q.node for q in fleet.cluster.quarantines()] == ["node-1"]
    assert fleet.cluster.nodes()["node-2"].answered


async def test_a_verdict_that_gets_worse_is_written_down() -> None:
    fleet = await a_quarantined_node()
    await fleet.break_("node-1", kind=MISSING, state=NodeState.GONE, at=fleet.now).settle()
    (quarantine,) = fleet.cluster.quarantines()
    assert quarantine.verdict is NodeState.GONE
    assert {e.kind for e in quarantine.evidence} == {"xid", MISSING}
    mark = fleet.cluster.nodes()["node-1"].mark
    assert mark is not None
    assert mark.verdict == "gone"


async def test_a_deleted_node_leaves_a_record_that_no_longer_counts() -> None:
    fleet = a_fleet(budget=1).break_("node-1")
    await fleet.settle()
    fleet.cluster.remove(kube.NODES, "node-1")
    await fleet.break_("node-2").settle()
    states = {q.node: q.state for q in fleet.cluster.quarantines()}
    assert states == {"node-1": "NodeAbsent", "node-2": "Quarantined"}
    for quarantine in fleet.cluster.quarantines():
        assert quarantine.status is not None
        assert f"kubectl delete nodequarantine {quarantine.name}" in quarantine.status["message"]


async def test_a_node_that_registers_again_unschedulable_stays_so_after_its_release() -> None:
    """A provisioning tool or an administrator has cordoned the new Node object."""
    fleet = await a_quarantined_node()
    fleet.cluster.remove(kube.NODES, "node-1")
    await fleet.settle()
    fleet.cluster.add(kube.NODES, a_node_object("node-1", unschedulable=True))
    await fleet.settle()
    assert fleet.cluster.nodes()["node-1"].mark is not None, "its fault is known"
    await fleet.delete()
    node = fleet.cluster.nodes()["node-1"]
    assert (node.mark, node.tainted, node.unschedulable) == (None, False, True)


async def test_another_machine_under_the_name_is_not_marked() -> None:
    fleet = await a_quarantined_node()
    fleet.heal("node-1")
    fleet.cluster.add(kube.NODES, a_node_object("node-1", machine="new"))
    await fleet.settle()
    assert cordoned(fleet) == []
    (left,) = fleet.cluster.quarantines()
    assert left.state == "NodeReplaced"
    assert left.status is not None
    assert f"kubectl delete nodequarantine {left.name}" in left.status["message"]
    assert "is another machine now (new)" in left.status["releasedBy"]


async def test_a_machine_that_comes_back_in_quarantine_is_not_told_as_released() -> None:
    fleet = (await a_quarantined_node()).heal("node-1")
    for machine in ("new", "machine-node-1"):
        fleet.cluster.add(kube.NODES, a_node_object("node-1", machine=machine))
        await fleet.settle()
    assert cordoned(fleet) == ["node-1"]
    (back,) = fleet.cluster.quarantines()
    assert back.state == "Quarantined"
    assert back.status is not None
    assert back.status["releasedBy"] == ""


async def test_gpus_that_a_node_shows_are_written_down_once() -> None:
    fleet = a_fleet()
    fleet.gpus = {"node-1": frozenset({"GPU-b", "GPU-a"})}
    await fleet.settle()
    assert fleet.cluster.nodes()["node-1"].expected == ("GPU-a", "GPU-b")
    assert fleet.cluster.writes == ["patch nodes node-1"]


async def test_a_gpu_that_was_swapped_takes_the_place_of_the_old_one() -> None:
    fleet = a_fleet()
    fleet.gpus = {"node-1": frozenset({"GPU-b", "GPU-a"})}
    await fleet.settle()
    fleet.gpus = {"node-1": frozenset({"GPU-b", "GPU-c"})}
    await fleet.settle()
    assert fleet.cluster.nodes()["node-1"].expected == ("GPU-b", "GPU-c")


async def test_a_node_with_more_gpus_than_its_annotation_lists_is_patched_once() -> None:
    fleet = a_fleet()
    fleet.gpus = {"node-1": frozenset(f"GPU-{n:03}" for n in range(EXPECTED_LIMIT + 1))}
    await fleet.settle()
    assert len(fleet.cluster.nodes()["node-1"].expected) == EXPECTED_LIMIT
    assert len(fleet.cluster.writes) == 1


async def test_a_quarantine_written_by_hand_quarantines_its_node() -> None:
    fleet = a_fleet()
    spec = {
        "nodeName": "node-3", "incident": "by-hand", "verdict": "Leaving", "reason": "Manual",
        "message": "a fan is loud", "decidedAt": "2026-11-21T10:00:00Z",
    }  # fmt: skip
    fleet.cluster.add(kube.QUARANTINES, {"metadata": {"name": "by-hand"}, "spec": spec})
    await fleet.settle()
    assert cordoned(fleet) == ["node-3"]
    await fleet.delete()
    assert cordoned(fleet) == []


def test_a_silent_exporter_is_told_on_its_node_and_nothing_else_is_done() -> None:
    fleet = a_fleet()
    fleet.silences = {"node-2": "every scrape since 12:00:00Z failed: refused"}
    told = [action for action in fleet.plan().actions if isinstance(action, Tell)]
    assert [(t.node, t.reason, t.warning) for t in told] == [("node-2", "ExporterSilent", True)]
    assert told[0].message == (
        "node node-2: every scrape since 12:00:00Z failed: refused; Everstep takes no action"
    )
    assert not [action for action in fleet.plan().actions if not isinstance(action, Tell)]


# --- what the API server refuses


@pytest.mark.parametrize("down", [False, True])
async def test_a_node_whose_change_is_refused_holds_up_no_other(down: bool) -> None:
    fleet = a_fleet().break_("node-1")
    fleet.cluster.webhook_down = down
    fleet.cluster.refused.add("node-1")
    await fleet.settle()
    await fleet.break_("node-2", at=fleet.now).settle()
    assert cordoned(fleet) == ["node-2"]
    fleet.heal("node-1").heal("node-2").break_("node-3", at=fleet.now)
    await fleet.delete()
    assert cordoned(fleet) == ["node-3"], "node-2 is released, and node-3 is cordoned"


async def test_a_node_that_has_changed_since_it_was_read_holds_up_no_other() -> None:
    """Its watch may be late, or somebody else may write it all the time."""
    fleet = await a_fleet().break_("node-1").break_("node-2", at=START + 0.5).settle()
    for name in ("node-1", "node-2"):
        fleet.cluster.change_node(name, {"spec": {"unschedulable": None}})
    planned = fleet.plan()
    fleet.cluster.change_node("node-1", {"metadata": {"labels": {"a": "b"}}})
    outcome = await apply_plan(fleet.cluster, planned.actions, fleet.now)
    assert (cordoned(fleet), outcome.again) == (["node-2"], True)


async def test_a_quarantine_that_is_refused_holds_up_no_other_and_is_tried_again() -> None:
    fleet = a_fleet().break_("node-1").break_("node-2", at=START + 0.5)
    refused, _ = (action.quarantine.name for action in fleet.plan().actions)  # type: ignore[union-attr]
    fleet.cluster.refused.add(refused)
    await fleet.settle()
    assert cordoned(fleet) == ["node-2"]
    fleet.cluster.refused.clear()
    await fleet.settle(REFUSED_SECONDS)
    assert cordoned(fleet) == ["node-1", "node-2"]


async def test_a_quarantine_whose_machine_was_edited_holds_up_no_other_node() -> None:
    """It no longer binds its node, but has the name that the node's next quarantine would get."""
    fleet = await a_quarantined_node()
    (name,) = (q.name for q in fleet.cluster.quarantines())
    await fleet.cluster.patch(kube.QUARANTINES, name, {"spec": {"machine": "another"}})
    await fleet.break_("node-2", at=fleet.now).settle()
    assert "node-2" in cordoned(fleet)


# --- another machine under the same Node object


async def test_a_node_object_that_another_machine_took_over_is_released() -> None:
    """For example after a new installation, where nobody deletes the Node."""
    fleet = a_fleet(budget=1, taints=[OTHERS_TAINT])
    await fleet.break_("node-1").settle()
    info = {"machineID": "new", "bootID": "boot-2"}
    fleet.heal("node-1").cluster.change_node("node-1", {"status": {"nodeInfo": info}})
    await fleet.settle()
    node = fleet.cluster.nodes()["node-1"]
    assert (node.unschedulable, node.taints) == (False, (OTHERS_TAINT,))
    assert names.ANNOTATION_CORDONED not in fleet.cluster.node("node-1")["metadata"]["annotations"]
    assert fleet.states() == {}
    assert fleet.cluster.quarantines()[0].state == "NodeReplaced"
    await fleet.break_("node-1", at=fleet.now).settle()
    assert cordoned(fleet) == ["node-1"], "the new machine has a fault of its own"


async def test_a_machine_that_is_installed_anew_stays_in_quarantine() -> None:
    """A diskless node gets a new /etc/machine-id at each boot; its hardware keeps its UUID and its fault."""
    fleet = a_fleet()
    fleet.cluster.change_node("node-1", {"status": {"nodeInfo": {"systemUUID": "board-1"}}})
    await fleet.break_("node-1").settle()
    info = {"machineID": "new", "bootID": "boot-2"}
    fleet.heal("node-1").cluster.change_node("node-1", {"status": {"nodeInfo": info}})
    await fleet.settle()
    assert cordoned(fleet) == ["node-1"]
    assert fleet.cluster.quarantines()[0].state == "Quarantined"


async def test_what_an_earlier_version_recorded_by_machine_id_stays_in_force() -> None:
    fleet = await a_quarantined_node()
    fleet.gpus = {"node-1": frozenset({"GPU-a"})}
    await fleet.settle()
    fleet.cluster.change_node("node-1", {"status": {"nodeInfo": {"systemUUID": "board-1"}}})
    fleet.cluster.writes.clear()
    await fleet.restart().settle()
    assert cordoned(fleet) == ["node-1"]
    assert fleet.cluster.nodes()["node-1"].expected == ("GPU-a",)
    assert not [text for text in fleet.cluster.writes if "quarantine" in text], "nothing is new"
    await fleet.delete()
    await fleet.settle()
    assert cordoned(fleet) == [], "the answered evidence is known under its former name, too"

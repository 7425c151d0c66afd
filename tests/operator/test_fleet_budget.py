"""Beyond the cordon budget, jobs treat a verdict as a suspicion, armed or observe-only."""

import pytest

from everstep_operator.evidence import MISSING
from everstep_operator.fleet.budget import Budget
from everstep_operator.fleet.observed import Policy
from everstep_operator.values import NodeState
from fleet_given import START, Fleet

MODES = pytest.mark.parametrize("observe_only", [False, True], ids=["armed", "observing"])


def a_fleet(observe_only: bool, nodes: int = 20, budget: int = 2) -> Fleet:
    fleet = Fleet(policy=Policy(budget=Budget(number=budget)), observe_only=observe_only)
    fleet.cluster.add_nodes(nodes)
    return fleet


def count(fleet: Fleet) -> dict[str, int]:
    states = list(fleet.states().values())
    return {state: states.count(state) for state in sorted(set(states))}


@MODES
async def test_a_driver_rollout_that_breaks_every_node_moves_jobs_off_two_of_them(
    observe_only: bool,
) -> None:
    fleet = a_fleet(observe_only)
    for index in range(20):
        fleet.break_(f"node-{index}", at=START + index / 100)
    assert count(fleet) == {"leaving": 2, "suspect": 18}
    await fleet.settle()
    assert count(fleet) == {"leaving": 2, "suspect": 18}
    assert sum(verdict.over_budget for verdict in fleet.verdicts().values()) == 18


@MODES
async def test_a_dcgm_rollout_that_hides_every_gpu_kills_no_third_pod(observe_only: bool) -> None:
    fleet = a_fleet(observe_only)
    for index in range(20):
        fleet.break_(f"node-{index}", kind=MISSING, state=NodeState.GONE)
    await fleet.settle()
    assert count(fleet) == {"gone": 2, "suspect": 18}


@MODES
async def test_who_was_admitted_stays_so_when_worse_comes_later(observe_only: bool) -> None:
    fleet = a_fleet(observe_only, budget=1).break_("node-1")
    await fleet.settle()
    fleet.break_("node-2", kind=MISSING, state=NodeState.GONE, at=fleet.now)
    await fleet.settle()
    assert fleet.states() == {"node-1": "leaving", "node-2": "suspect"}


@MODES
async def test_room_in_the_budget_turns_the_suspicion_into_the_verdict(observe_only: bool) -> None:
    fleet = a_fleet(observe_only, budget=1).break_("node-1").break_("node-2", at=START + 0.5)
    await fleet.settle()
    assert fleet.states() == {"node-1": "leaving", "node-2": "suspect"}
    fleet.heal("node-1")
    if not observe_only:
        await fleet.delete(next(q.name for q in fleet.cluster.quarantines() if q.cordon))
    await fleet.settle()
    assert fleet.states() == {"node-2": "leaving"}


@MODES
async def test_a_verdict_that_no_pass_has_weighed_is_a_suspicion_within_the_budget(
    observe_only: bool,
) -> None:
    """A rank's death is published at once, and the newest page may have convicted a node since the last pass."""
    fleet = await a_fleet(observe_only, budget=1).settle()
    at_once = fleet.break_("node-1").verdicts_at_once()["node-1"]
    assert (at_once.state, at_once.over_budget) == (NodeState.SUSPECT, False)
    assert at_once.evidence == fleet.verdicts()["node-1"].evidence
    await fleet.settle()
    fleet.break_("node-2")
    assert not fleet.verdicts_at_once()["node-2"].over_budget
    await fleet.step()
    assert fleet.verdicts_at_once()["node-2"].over_budget


async def test_without_the_crd_the_budget_holds_all_the_same() -> None:
    fleet = a_fleet(observe_only=False)
    for index in range(20):
        fleet.break_(f"node-{index}", at=START + index / 100)
    fleet.cluster.crd = "missing"
    assert count(fleet) == {"leaving": 2, "suspect": 18}


async def test_marks_of_an_armed_operator_count_in_the_budget_of_one_that_observes() -> None:
    fleet = a_fleet(observe_only=False, budget=1).break_("node-1")
    await fleet.settle()
    fleet.observe_only = True
    await fleet.restart().break_("node-2").settle()
    assert fleet.states() == {"node-1": "leaving", "node-2": "suspect"}


async def test_the_message_of_a_verdict_beyond_the_budget_says_what_follows_and_what_to_do() -> (
    None
):
    fleet = a_fleet(observe_only=False, budget=1).break_("node-1").break_("node-2", at=START + 1)
    await fleet.settle()
    verdict = fleet.verdicts()["node-2"]
    assert (verdict.reason, verdict.quarantined) == ("GpuFatalXid", False)
    assert "the cordon budget is spent, so jobs stay on the node" in verdict.message
    assert verdict.incident == next(
        q.incident for q in fleet.cluster.quarantines() if q.node == "node-2"
    )

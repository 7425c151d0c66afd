"""Every prefix of a fleet plan is a legal state.

The plan is cut after any action, the memory is kept or dropped, and the operator plans again.
"""

from collections.abc import Awaitable, Callable

import pytest

from everstep_operator import kube
from everstep_operator.evidence import MISSING
from everstep_operator.fleet.budget import Budget
from everstep_operator.fleet.observed import Policy
from everstep_operator.values import NodeState
from fleet_given import START, Fleet

Story = Callable[[Fleet], Awaitable[None]]


def a_fleet() -> Fleet:
    fleet = Fleet(policy=Policy(budget=Budget(number=2)))
    fleet.cluster.add_nodes(5)
    fleet.gpus = {f"node-{i}": frozenset({"GPU-a", "GPU-b"}) for i in range(5)}
    return fleet


async def three_faults(fleet: Fleet) -> None:
    for index in range(3):
        fleet.break_(f"node-{index}", at=START + index / 10)


async def a_fault_that_gets_worse(fleet: Fleet) -> None:
    await fleet.break_("node-1").settle()
    fleet.break_("node-1", kind=MISSING, state=NodeState.GONE)


async def a_release(fleet: Fleet) -> None:
    await fleet.break_("node-1").break_("node-2").settle()
    fleet.cluster.remove(kube.QUARANTINES, fleet.cluster.quarantines()[0].name)
    await fleet.step()
    fleet.now += 2


async def a_release_with_another_waiting(fleet: Fleet) -> None:
    await three_faults(fleet)
    await fleet.settle()
    held = next(q for q in fleet.cluster.quarantines() if q.cordon)
    fleet.cluster.remove(kube.QUARANTINES, held.name)
    await fleet.step()
    fleet.now += 2


async def marks_torn_off(fleet: Fleet) -> None:
    await fleet.break_("node-1").settle()
    fleet.cluster.change_node("node-1", {"spec": {"taints": [], "unschedulable": False}})


def check_invariants(fleet: Fleet) -> None:
    nodes, quarantines = fleet.cluster.nodes(), fleet.cluster.quarantines()
    marked = [node for node in nodes.values() if node.mark is not None]
    assert len(marked) <= 2, "more nodes are marked than the budget allows"
    assert all(n.mark is not None for n in nodes.values() if n.unschedulable), (
        "a node is cordoned without our mark"
    )
    assert len({q.node for q in quarantines}) == len(quarantines), "a node has two quarantines"
    assert sum(q.cordon for q in quarantines) <= 2


@pytest.mark.parametrize("forget", [False, True], ids=["goes-on", "operator-restarts"])
@pytest.mark.parametrize(
    "story",
    [three_faults, a_fault_that_gets_worse, a_release, a_release_with_another_waiting, marks_torn_off],
    ids=lambda story: story.__name__,
)  # fmt: skip
async def test_a_plan_cut_after_any_action_leads_to_the_same_end(
    story: Story, forget: bool
) -> None:
    straight = a_fleet()
    await story(straight)
    await straight.settle(36, pace=4)
    cuts = 0
    for at_pass in range(6):
        for after in range(8):
            fleet = a_fleet()
            await story(fleet)
            for _ in range(at_pass):
                await fleet.step()
            if after >= len(fleet.plan().actions):
                break
            await fleet.step(only=after)
            check_invariants(fleet)
            if forget:
                fleet.memory = type(fleet.memory)()
            await fleet.settle(36, pace=4)
            check_invariants(fleet)
            cuts += 1
            if forget and fleet.cluster.shape() != straight.cluster.shape():
                await release_again(fleet, straight)
            assert fleet.cluster.shape() == straight.cluster.shape()
    assert cuts > 0


async def release_again(fleet: Fleet, straight: Fleet) -> None:
    """Delete again what the operator put back: it restarted before it had acted on the deletion."""
    wanted = {q.name for q in straight.cluster.quarantines()}
    for quarantine in fleet.cluster.quarantines():
        if quarantine.name not in wanted:
            fleet.cluster.remove(kube.QUARANTINES, quarantine.name)
    await fleet.settle(36, pace=4)

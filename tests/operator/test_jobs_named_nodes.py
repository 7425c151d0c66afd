"""A pod names a bounded number of nodes in its affinity, the most important ones first."""

from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest

from everstep_operator.jobs import placement, starts
from everstep_operator.jobs.actions import CreatePod
from everstep_operator.jobs.observed import Observed
from everstep_operator.jobs.plan import plan
from everstep_operator.jobs.stamps import to_stamp
from everstep_operator.model_status import StartFailure
from everstep_operator.values import NodeState, NodeVerdict
from job_builders import NOW, a_job, a_slot, a_status, a_verdict, an_observation

FLEET = 500


def a_waiting_job(state: NodeState, **changes: Any) -> Observed:
    """A job without pods yet; FLEET nodes have the verdict `state`."""
    verdicts = {f"n{i:03}": a_verdict(f"n{i:03}", state, **changes) for i in range(FLEET)}
    job = a_job(status=a_status(slots=[], epoch=None))
    return an_observation(job=job, pods=(), seen=None, verdicts=verdicts)


def named(observed: Observed) -> list[str]:
    """The nodes that the first new pod names, in requirements and preferences."""
    body = next(a.body for a in plan(observed, NOW).actions if isinstance(a, CreatePod))
    affinity = (body["spec"].get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    terms = [*required.get("nodeSelectorTerms", ())]
    preferred = affinity.get("preferredDuringSchedulingIgnoredDuringExecution") or ()
    terms += [wish["preference"] for wish in preferred]
    return [field["values"][0] for term in terms for field in term.get("matchFields", ())]


@pytest.mark.parametrize("state", [NodeState.LEAVING, NodeState.GONE, NodeState.SUSPECT])
def test_a_pod_names_few_nodes_however_many_are_at_fault(state: NodeState) -> None:
    found = named(a_waiting_job(state))
    assert 0 < len(found) <= placement.NAMED_NODES


def at(held: NodeVerdict, **marks: float) -> NodeVerdict:
    return replace(held, marks=MappingProxyType(marks))


def test_nodes_that_no_cordon_guards_come_first_then_the_newest_verdicts() -> None:
    observed = a_waiting_job(NodeState.LEAVING)
    verdicts = {
        name: at(verdict, verdict=float(index), **({} if index % 2 else {"cordon": 1.0}))
        for index, (name, verdict) in enumerate(observed.verdicts.items())
    }
    found = named(replace(observed, verdicts=verdicts))
    assert sorted(found)[-1] == f"n{FLEET - 1:03}"
    assert all(int(name[1:]) % 2 for name in found)


def test_of_suspects_those_beyond_the_budget_come_first() -> None:
    observed = a_waiting_job(NodeState.SUSPECT)
    worst = replace(observed.verdicts["n400"], over_budget=True)
    found = named(replace(observed, verdicts={**observed.verdicts, "n400": worst}))
    assert "n400" in found


def test_nodes_on_which_pods_failed_to_start_are_within_the_same_bound() -> None:
    """Two slots failed on each of FLEET nodes, and FLEET other nodes have verdicts."""
    observed = a_waiting_job(NodeState.LEAVING)
    failures = [
        StartFailure(node=f"bad{i:03}", at=to_stamp(NOW - 60), reason="StartError")
        for i in range(FLEET)
    ]
    slots = [a_slot(s, pod_uid=None, node=None, start_failures=failures) for s in (1, 2)]
    slots.insert(0, a_slot(0, pod_uid=None, node=None))
    observed = replace(observed, job=a_job(status=a_status(slots=slots, epoch=None)))
    record, shared = slots[0], starts.list_shared(slots, NOW)
    left = placement.nodes_left(observed)
    assert len(shared) == FLEET
    assert len(placement.nodes_to_avoid(left, shared, record, NOW)) == placement.NAMED_NODES
    assert len(placement.nodes_to_shun((), shared, record, NOW)) == placement.NAMED_NODES


def test_nodes_on_which_its_own_slot_failed_come_first() -> None:
    failure = StartFailure(node="own", at=to_stamp(NOW - 60), reason="StartError")
    record = a_slot(0, start_failures=[failure])
    left = placement.nodes_left(a_waiting_job(NodeState.LEAVING))
    assert "own" in placement.nodes_to_avoid(left, (), record, NOW)

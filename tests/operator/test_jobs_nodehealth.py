"""How a job reports verdicts beyond the cordon budget, and how it acts on them."""

from dataclasses import replace

from everstep_operator.jobs import nodehealth
from everstep_operator.jobs.actions import CreatePod, DeletePod
from everstep_operator.jobs.observed import Observed
from everstep_operator.jobs.plan import plan
from everstep_operator.values import NodeState, NodeVerdict
from job_builders import NOW, a_verdict, an_observation


def beyond(node: str) -> NodeVerdict:
    verdict = a_verdict(node, NodeState.SUSPECT)
    return replace(verdict, over_budget=True, message=f"node {node}: XID 64; the budget is spent")


def condition(observed: Observed) -> tuple[str, str, str] | None:
    status = plan(observed, NOW).status
    assert status is not None
    found = [c for c in status.conditions if c.type == "NodesHealthy"]
    return (found[0].status, found[0].reason, found[0].message) if found else None


def a_running_job(*nodes: str) -> Observed:
    return an_observation(verdicts={node: beyond(node) for node in nodes})


def test_a_job_on_sound_nodes_carries_no_such_condition() -> None:
    assert condition(a_running_job()) is None
    assert condition(a_running_job("node-99")) is None


def test_a_job_stays_on_nodes_beyond_the_budget_and_says_so() -> None:
    observed = a_running_job("node-0", "node-1", "node-2")
    planned = plan(observed, NOW)
    assert not [a for a in planned.actions if isinstance(a, CreatePod | DeletePod)]
    assert planned.wanted is not None
    assert planned.wanted.leave == ()
    told = condition(observed)
    assert told is not None
    assert told[:2] == ("False", "VerdictsBeyondBudget")
    assert "node node-0: XID 64; the budget is spent" in told[2]
    assert "bad driver or DCGM roll-out" in told[2]


def test_a_long_list_of_nodes_is_cut() -> None:
    text = nodehealth._describe([beyond(f"node-{i}") for i in range(9)])
    assert "(and 6 more nodes)" in text


def test_the_condition_turns_true_when_the_budget_has_room_again() -> None:
    first = plan(a_running_job("node-0"), NOW).status
    assert first is not None
    sound = a_running_job()
    later = replace(sound, job=replace(sound.job, status=first))
    assert condition(later) == ("True", "NoVerdictBeyondBudget", "")


def test_before_the_nodes_are_judged_the_condition_stays_as_it_was() -> None:
    first = plan(a_running_job("node-0"), NOW).status
    assert first is not None
    sound = a_running_job()
    unjudged = replace(sound, job=replace(sound.job, status=first), judged=False)
    told = condition(unjudged)
    assert told is not None
    assert told[0] == "False"

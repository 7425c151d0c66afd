"""One fault is one incident and one restart with one cause; budgets count within a time window."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from everstep_agent.coordinator import breaks
from everstep_contract.levels import RuntimeIncident
from everstep_contract.report import Cause
from everstep_operator.jobs import budgets, conditions
from everstep_operator.jobs import restarts as module
from everstep_operator.jobs.observed import NodeFact, Observed
from everstep_operator.jobs.plan import plan
from everstep_operator.metrics import Metrics
from everstep_operator.model_status import Incident, JobStatus, Restarts
from everstep_operator.values import NodeState
from everstep_operator.world import World
from job_builders import (
    NOW,
    a_job,
    a_left,
    a_pod,
    a_seen,
    a_spec,
    a_status,
    a_verdict,
    an_observation,
)

HOUR = 3600.0
DAY = 86_400.0


def told(number: int = 1, cause: str = "WorkerDied", **changes: Any) -> RuntimeIncident:
    incident = RuntimeIncident(
        id=f"lm-{number}", cause=cause, message=f"{cause} in slot 1", slot=1, slots=(1,), rank=1, step=42,
    )  # fmt: skip
    return replace(incident, **changes)


def mended(number: int = 1, cause: str = "WorkerDied", **changes: Any) -> RuntimeIncident:
    return told(number, cause, open=False, rung="restart", **changes)


def again(observed: Observed, now: float, **changes: Any) -> Observed:
    """What the next pass observes after this pass's status was written."""
    status = plan(observed, now).status
    return replace(observed, job=replace(observed.job, status=status), **changes)


def restarts(status: JobStatus) -> Mapping[str, int]:
    assert status.restarts is not None
    assert status.restarts.total == sum(status.restarts.by_cause.values())
    return status.restarts.by_cause


def ids(status: JobStatus) -> list[tuple[str, str, list[int]]]:
    return [(i.id, i.cause, [m.slot for m in i.slots]) for i in status.incidents]


def a_lost_node(*slots: int, **changes: Any) -> Observed:
    """These slots' pods are on node-9, whose kubelet has been silent for 61 s; no agent answers."""
    pods = tuple(a_pod(s, node="node-9" if s in slots else f"node-{s}") for s in range(3))
    nodes = {f"node-{s}": NodeFact(name=f"node-{s}") for s in range(6)}
    nodes["node-9"] = NodeFact(name="node-9", not_ready_for=61.0, why="no heartbeat")
    return an_observation(pods=pods, nodes=nodes, seen=None, **changes)


# --- one fault, one incident ------------------------------------------------------------------------------


def test_a_lost_node_with_two_slots_is_one_incident_and_one_restart() -> None:
    """Regression: a partitioned node was counted as two incidents and two restarts."""
    status = plan(a_lost_node(1, 2), NOW).status
    assert [r.attempt for r in status.slots] == [1, 2, 2]
    assert ids(status) == [("nodelost-1-1", "NodeLost", [1, 2])]
    assert restarts(status) == {"NodeLost": 1}


def test_what_the_job_tells_of_the_lost_node_is_part_of_the_same_incident() -> None:
    """Regression: `restarts.total` was 2 while the counts by cause added up to 4."""
    lost = told(cause="AgentLost", slot=1, slots=(1, 2))
    silent = replace(a_lost_node(1, 2), seen=a_seen(running=False, incidents=(lost,)))
    first = again(silent, NOW)
    assert ids(first.job.status) == [("lm-1", "NodeLost", [1, 2])]
    over = replace(lost, open=False, rung="restart")
    later = replace(first, seen=a_seen(running=False, incidents=(over,), restarts={"AgentLost": 1}))
    assert restarts(plan(later, NOW + 5).status) == {"NodeLost": 1}


def test_a_slot_of_the_lost_node_that_is_noticed_later_joins_the_incident() -> None:
    first = again(a_lost_node(1), NOW)
    pods = (a_pod(0), a_pod(2, node="node-9"))
    second = plan(replace(first, pods=pods), NOW + 2).status
    assert ids(second) == [("nodelost-1-1", "NodeLost", [1, 2])]
    assert restarts(second) == {"NodeLost": 1}


def test_two_nodes_that_are_lost_one_after_the_other_are_two() -> None:
    first = again(a_lost_node(1), NOW)
    nodes = {
        **first.nodes,
        "node-2": NodeFact(name="node-2", not_ready_for=61.0, why="no heartbeat"),
    }
    status = plan(replace(first, pods=(a_pod(0), a_pod(2)), nodes=nodes), NOW + 2).status
    assert restarts(status) == {"NodeLost": 2}


def test_a_slot_whose_new_pod_is_lost_before_it_trained_is_still_in_the_same_interruption() -> None:
    first = again(a_lost_node(1), NOW)
    new = replace(first, pods=(a_pod(0), a_pod(1, 2, node="node-4"), a_pod(2)))
    made = again(new, NOW + 1)
    status = plan(replace(made, pods=(a_pod(0), a_pod(2))), NOW + 2).status
    assert [r.attempt for r in status.slots] == [1, 3, 1]
    assert restarts(status) == {"NodeLost": 1}


def test_once_the_slot_has_trained_its_next_loss_is_another_interruption() -> None:
    first = again(a_lost_node(1), NOW)
    pods = (a_pod(0), a_pod(1, 2, node="node-4"), a_pod(2))
    back = a_seen(((0, 1), (1, 2), (2, 1)), epoch=2)
    trains = again(replace(first, pods=pods, seen=back), NOW + 9)
    assert [i.open for i in trains.job.status.incidents] == [False]
    status = plan(replace(trains, pods=(a_pod(0), a_pod(2)), seen=None), NOW + 60).status
    assert restarts(status) == {"NodeLost": 1, "PodDeleted": 1}


def test_an_incident_of_many_slots_is_over_once_all_of_them_train() -> None:
    first = again(a_lost_node(1, 2), NOW)
    pods = (a_pod(0), a_pod(1, 2, node="node-4"), a_pod(2, 2, node="node-5"))
    one = again(replace(first, pods=pods, seen=a_seen(((0, 1), (1, 2)), epoch=2)), NOW + 5)
    (incident,) = one.job.status.incidents
    assert incident.open
    both = plan(replace(one, seen=a_seen(((0, 1), (1, 2), (2, 2)), epoch=3)), NOW + 9).status
    assert [(i.open, i.marks[-1].name) for i in both.incidents] == [(False, "running")]


def test_slots_that_a_smaller_job_gives_up_leave_in_one_incident() -> None:
    observed = an_observation(job=a_job(a_spec(replicas=1), status=a_status()))
    first = again(observed, NOW)
    assert ids(first.job.status) == [("scaleddown-1-1", "ScaledDown", [1, 2])]
    left = replace(first, seen=a_seen(running=False, left=(a_left(1), a_left(2))))
    assert restarts(plan(left, NOW + 3).status) == {}


def test_pods_of_one_node_that_is_drained_leave_in_one_incident() -> None:
    pods = (a_pod(0), *(a_pod(s, node="node-4", deleting_until=NOW + 30) for s in (1, 2)))
    first = again(an_observation(pods=pods), NOW)
    assert ids(first.job.status) == [("poddeleted-1-1", "PodDeleted", [1, 2])]
    left = replace(first, seen=a_seen(running=False, left=(a_left(1), a_left(2))))
    assert restarts(plan(left, NOW + 3).status) == {"PodDeleted": 1}


def test_pods_of_two_nodes_that_are_deleted_are_two() -> None:
    pods = (a_pod(0), *(a_pod(s, deleting_until=NOW + 30) for s in (1, 2)))
    assert len(ids(again(an_observation(pods=pods), NOW).job.status)) == 2


def test_more_open_incidents_than_are_kept_of_closed_ones_are_not_forgotten() -> None:
    gone = {
        f"node-{s}": a_verdict(f"node-{s}", NodeState.GONE, incident=f"inc-{s}") for s in range(20)
    }
    job = a_job(a_spec(replicas=20), status=a_status(20))
    nodes = {f"node-{s}": NodeFact(name=f"node-{s}") for s in range(20)}
    observed = an_observation(
        job=job, pods=tuple(a_pod(s) for s in range(20)), verdicts=gone, seen=None, nodes=nodes
    )
    first = again(observed, NOW)
    assert len(first.job.status.incidents) == 20
    assert plan(first, NOW + 1).status.incidents == first.job.status.incidents
    assert restarts(first.job.status) == {"NodeGone": 20}


# --- one cause --------------------------------------------------------------------------------------------


def test_a_rank_that_its_gpu_killed_is_charged_to_the_node_alone() -> None:
    died = again(an_observation(seen=a_seen(running=False, incidents=(told(),))), NOW)
    assert restarts(died.job.status) == {"WorkerDied": 1}
    convicted = replace(died, verdicts={"node-1": a_verdict("node-1", NodeState.GONE)})
    assert restarts(plan(convicted, NOW + 3).status) == {"NodeGone": 1}


def test_a_death_that_was_mended_before_its_node_s_verdict_is_charged_to_the_node_alone() -> None:
    before = again(an_observation(seen=a_seen(incidents=(mended(),))), NOW)
    assert restarts(before.job.status) == {"WorkerDied": 1}
    convicted = replace(before, verdicts={"node-1": a_verdict("node-1", NodeState.GONE)})
    moved = again(convicted, NOW + 30)
    assert restarts(moved.job.status) == {"NodeGone": 1}
    assert restarts(plan(moved, NOW + 31).status) == {"NodeGone": 1}, "the fault must count once"


def test_a_death_that_is_heard_of_after_the_verdict_is_not_charged_again() -> None:
    gone = {"node-1": a_verdict("node-1", NodeState.GONE)}
    moved = again(replace(an_observation(), verdicts=gone), NOW)
    late = replace(moved, seen=a_seen(incidents=(mended(),)))
    assert restarts(plan(late, NOW + 3).status) == {"NodeGone": 1}


def test_a_break_that_names_nobody_is_charged_once_it_is_explained() -> None:
    broken = told(cause="GroupBroken", slot=None, slots=())
    first = again(an_observation(seen=a_seen(running=False, incidents=(broken,))), NOW)
    assert restarts(first.job.status) == {}
    explained = replace(broken, cause="WorkerHung", slot=1, slots=(1,))
    second = again(replace(first, seen=a_seen(running=False, incidents=(explained,))), NOW + 1)
    assert restarts(second.job.status) == {"WorkerHung": 1}
    unexplained = replace(broken, open=False)
    assert restarts(
        plan(replace(first, seen=a_seen(incidents=(unexplained,))), NOW + 1).status
    ) == {"GroupBroken": 1}


@pytest.mark.parametrize(
    "cause", ["Leave", "Grow", "Shrink", "Start", "NoProgress", "BelowMinimum"]
)
def test_what_is_in_order_is_no_restart(cause: str) -> None:
    assert (
        restarts(plan(an_observation(seen=a_seen(incidents=(mended(cause=cause),))), NOW).status)
        == {}
    )


def test_a_stuck_group_that_its_members_formed_anew_may_have_been_slow_and_costs_nothing() -> None:
    stuck = mended(cause="GroupStuck")
    in_place = replace(stuck, rung="regroup")
    seen = [an_observation(seen=a_seen(incidents=(one,))) for one in (stuck, in_place)]
    assert [restarts(plan(s, NOW).status) for s in seen] == [{"GroupStuck": 1}, {}]


def test_a_leave_that_was_asked_for_counts_once_the_slot_moves() -> None:
    leaving = {"node-1": a_verdict("node-1", NodeState.LEAVING)}
    asked = again(replace(an_observation(), verdicts=leaving), NOW)
    assert restarts(asked.job.status) == {}
    left = replace(asked, seen=a_seen(running=False, left=(a_left(1),)))
    assert restarts(plan(left, NOW + 4).status) == {"NodeLeaving": 1}


def test_a_silent_job_changes_no_counter() -> None:
    died = again(an_observation(seen=a_seen(incidents=(mended(),))), NOW)
    assert plan(replace(died, seen=None), NOW + 60).status.restarts == died.job.status.restarts


def test_every_cause_that_counts_has_a_budget() -> None:
    known = [cause for causes in budgets.BUDGETS.values() for cause in causes]
    assert len(known) == len(set(known)), "a cause is in two budgets"
    ends = {c.value for c in (Cause.DONE, Cause.LEFT, Cause.STOPPED, Cause.FENCED)}
    without = ends | breaks.ENDS_THE_JOB | module.FREE
    assert (causes_of_the_runtime() | {c.value for c in Cause}) - {*known} - without == set()
    assert budgets.budget_of("SomethingNew") == "worker"


def causes_of_the_runtime() -> set[str]:
    """Those that the coordinator names itself."""
    names = {breaks.SAVE_LOST, breaks.REPLICAS_DIFFER, breaks.BELOW_MINIMUM}
    for path in Path(breaks.__file__).parent.glob("*.py"):
        names |= set(re.findall(r'\bcause="(\w+)"', path.read_text()))
    assert names >= {"AgentLost", "GroupStuck", "Replaced"}
    return names


# --- the window -------------------------------------------------------------------------------------------


def run_with(deaths: int, every: float, **recovery: Any) -> JobStatus:
    """The job's status after `deaths` deaths of ranks, `every` seconds apart, from each of which
    the job recovered. Stops early if the job fails.
    """
    observed = an_observation(job=a_job(a_spec(recovery=recovery), status=a_status()))
    now = NOW
    for number in range(deaths):
        now = NOW + number * every
        seen = a_seen(incidents=tuple(mended(n) for n in range(max(0, number - 9), number + 1)))
        observed = again(replace(observed, seen=seen), now)
        if conditions.is_true(observed.job.status, "Failed"):
            return observed.job.status
    return plan(observed, now + 1).status


def test_a_job_with_a_death_in_three_hours_goes_on_for_ever() -> None:
    """Regression: without a window, the job failed at the 21st failure."""
    status = run_with(100, 3 * HOUR)
    assert not conditions.is_true(status, "Failed")
    assert restarts(status) == {"WorkerDied": 100}


def test_too_many_within_the_window_fail_the_job_and_say_so() -> None:
    status = run_with(25, 60.0)
    failed = conditions.find_condition(status, "Failed")
    assert failed is not None
    assert failed.reason == "RestartBudgetExceeded"
    assert "21 interruptions of the kind `worker` within 24 h" in failed.message
    assert "recovery.restartBudgets.worker allows 20" in failed.message
    assert "WorkerDied 21" in failed.message


def test_the_spec_sets_the_window() -> None:
    budget = {"worker": 2, "windowSeconds": 3600}
    assert conditions.is_true(run_with(3, 600.0, restartBudgets=budget), "Failed")
    assert not conditions.is_true(run_with(30, 2000.0, restartBudgets=budget), "Failed")


def test_what_is_remembered_of_restarts_does_not_grow_with_the_job() -> None:
    status = run_with(400, HOUR / 2, restartBudgets={"worker": 1000})
    assert status.restarts is not None
    assert len(status.restarts.recent) <= 26
    assert sum(r.count for r in status.restarts.recent) >= 47


def test_a_charge_that_moves_to_another_cause_moves_in_the_window_too() -> None:
    died = again(an_observation(seen=a_seen(running=False, incidents=(told(),))), NOW)
    convicted = replace(died, verdicts={"node-1": a_verdict("node-1", NodeState.GONE)})
    status = plan(convicted, NOW + 3).status
    assert status.restarts is not None
    assert [(r.cause, r.count) for r in status.restarts.recent] == [("NodeGone", 1)]


def test_counters_of_an_older_operator_are_kept() -> None:
    """An older operator counted some interruptions under two causes; no budget counts them."""
    old = a_status(restarts=Restarts(total=2, by_cause={"NodeLost": 2, "AgentLost": 2}))
    assert restarts(plan(an_observation(job=a_job(status=old)), NOW).status) == {
        "NodeLost": 2,
        "AgentLost": 2,
    }


def test_an_incident_of_an_older_operator_is_read() -> None:
    old = Incident(
        id="inc-1", cause="NodeLost", slot=1, attempt=1, started_at="1970-01-12T13:46:40Z"
    )
    status = a_status(incidents=[old])
    planned = plan(an_observation(job=a_job(status=status)), NOW)
    assert [i.id for i in planned.status.incidents] == ["inc-1"]


def test_the_job_s_own_count_along_the_log_is_not_added_to_ours() -> None:
    seen = a_seen(restarts={"Start": 1, "WorkerDied": 3, "Leave": 2})
    assert restarts(plan(an_observation(seen=seen), NOW).status) == {}


# --- the metric -------------------------------------------------------------------------------------------


def read_page(status: JobStatus, name: str) -> dict[str, int]:
    """First label → what an operator that has just started exports."""
    world = World()
    document = {"restarts": status.restarts.model_dump(by_alias=True)} if status.restarts else {}
    metadata = {"namespace": "team", "name": "lm", "uid": "u1", "resourceVersion": "1"}
    world.jobs.put({"metadata": metadata, "status": document})
    text = Metrics((), world, lambda: True, observe_only=False).render().decode().splitlines()
    found = [line for line in text if line.startswith(f"{name}{{")]
    return {line.split('"')[1]: int(float(line.split()[-1])) for line in found}


def render(status: JobStatus) -> dict[str, int]:
    """Cause → restarts; only causes with restarts."""
    found = read_page(status, "everstep_job_restarts_total")
    return {cause: count for cause, count in found.items() if count}


def count_interruptions(status: JobStatus) -> int:
    return read_page(status, "everstep_job_interruptions_total")["lm"]


def test_the_counter_for_prometheus_never_falls_not_even_when_the_operator_restarts() -> None:
    """Prometheus would take a fall for a reset, and count all restarts of that cause once more."""
    died = again(an_observation(seen=a_seen(incidents=(mended(),))), NOW)
    assert render(died.job.status) == {"WorkerDied": 1}
    convicted = replace(died, verdicts={"node-1": a_verdict("node-1", NodeState.GONE)})
    moved = again(convicted, NOW + 30)
    assert restarts(moved.job.status) == {"NodeGone": 1}
    assert moved.job.status.restarts is not None
    assert moved.job.status.restarts.total == 1, "the alert on interruptions counts it once"
    assert count_interruptions(moved.job.status) == 1
    assert render(moved.job.status) == {"NodeGone": 1, "WorkerDied": 1}
    assert render(plan(moved, NOW + 31).status) == {"NodeGone": 1, "WorkerDied": 1}


def test_the_usual_causes_are_there_before_the_first_restart() -> None:
    """Prometheus does not count the increase from no series to 1."""
    found = read_page(a_status(), "everstep_job_restarts_total")
    assert set(found.values()) == {0}
    assert {"NodeGone", "NodeLeaving", "NodeLost", "WorkerDied", "UserError"} <= found.keys()
    known = set[str]().union(*budgets.BUDGETS.values())
    assert found.keys() <= known, "a cause that does not exist"


def test_two_deaths_that_are_traced_to_one_gpu_are_one_and_the_counter_does_not_fall() -> None:
    """Prometheus would count all interruptions so far once more, and the alert would fire."""
    first = again(an_observation(seen=a_seen(incidents=(mended(),))), NOW)
    both = again(replace(first, seen=a_seen(incidents=(mended(), mended(2)))), NOW + 20)
    assert restarts(both.job.status) == {"WorkerDied": 2}
    convicted = replace(both, verdicts={"node-1": a_verdict("node-1", NodeState.GONE)})
    moved = again(convicted, NOW + 30)
    assert restarts(moved.job.status) == {"NodeGone": 1}
    for status in (both.job.status, moved.job.status, plan(moved, NOW + 31).status):
        assert count_interruptions(status) == 2


@pytest.mark.parametrize(("leads", "shown"), [(True, ["everstep_silent_nodes 2.0"]), (False, [])])
def test_only_the_leader_counts_silent_nodes(leads: bool, shown: list[str]) -> None:
    metrics = Metrics((), World(), lambda: leads, observe_only=False, count_silent=lambda: 2)
    text = metrics.render().decode().splitlines()
    assert [line for line in text if line.startswith("everstep_silent_nodes")] == shown


def test_a_job_that_makes_up_causes_fills_neither_status_nor_metrics(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """New incidents, and new causes of an old one."""
    monkeypatch.setattr(module, "MOST_CAUSES", 3)
    counted: Restarts | None = None
    for number in range(5):
        entry = Incident(id=f"lm-{number}", cause=f"Made{number}", started_at="", open=False)
        counted, (entry,) = module.charge(counted, [entry], {}, DAY, NOW)
    assert counted is not None
    assert counted.by_cause == {"Made0": 1, "Made1": 1, "Made2": 1, "Other": 2}
    assert counted.total == 5
    for number in range(5, 8):
        entry = entry.model_copy(update={"cause": f"Made{number}"})
        counted, (entry,) = module.charge(counted, [entry], {}, DAY, NOW)
    assert counted.total == 5
    assert len({*counted.by_cause, *counted.moved_by_cause}) == 4

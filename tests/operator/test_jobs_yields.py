"""Silent nodes: when the job may leave a pod out, and when the pod's attempt rises."""

from dataclasses import replace
from typing import Any

import pytest

from everstep_contract.levels import RuntimeIncident, Seen, SlotAttempt, Stop, Yield
from everstep_operator.jobs import conditions, placement
from everstep_operator.jobs.actions import CreatePod, Plan
from everstep_operator.jobs.observed import NodeFact, Observed
from everstep_operator.jobs.plan import BUSY_SECONDS, QUIET_SECONDS, plan
from everstep_operator.model_status import SlotStatus
from everstep_operator.values import NodeState
from job_builders import (
    NOW,
    a_job,
    a_pod,
    a_seen,
    a_slot,
    a_spec,
    a_status,
    a_verdict,
    an_observation,
)

LOST = SlotAttempt(slot=2, attempt=1)
YIELD = Yield(slot=2, attempt=1, epoch=1)


def a_silent_job(seconds: float = 30.0, seen: Seen | None = None, **changes: Any) -> Observed:
    """Slot 2 and its node have been silent for `seconds`, and the others take no steps."""
    told = a_seen(members=(), running=False, silent=(LOST,))
    observed = an_observation(seen=seen or told, silent_nodes={"node-2": seconds})
    return replace(observed, **changes)


def yields(observed: Observed) -> tuple[Yield, ...]:
    wanted = plan(observed, NOW).wanted
    assert wanted is not None
    return wanted.yields


def raised(planned: Plan) -> list[SlotStatus]:
    return [record for record in planned.status.slots if record.attempt > 1]


# --- what is allowed ----------------------------------------------------------------------------


def test_a_member_that_is_silent_to_all_may_be_left_out_of_the_epoch_that_it_was_in() -> None:
    assert yields(a_silent_job()) == (YIELD,)
    later = a_seen(members=(), running=False, epoch=7, silent=(LOST,))
    assert yields(a_silent_job(seen=later)) == (replace(YIELD, epoch=7),)


def test_the_word_alone_moves_nobody() -> None:
    planned = plan(a_silent_job(), NOW)
    assert raised(planned) == []
    assert planned.actions == ()


STEPS = a_seen(silent=(LOST,))
HEARD = a_seen(members=(), running=False)
NEVER_TRAINED = a_seen(members=(), running=False, epoch=0, silent=(LOST,))
ANOTHER_ATTEMPT = a_seen(members=(), running=False, silent=(SlotAttempt(slot=2, attempt=9),))


@pytest.mark.parametrize(
    "observed",
    [
        pytest.param(a_silent_job(24.9), id="not yet so long"),
        pytest.param(a_silent_job(silent_nodes={}), id="its node renews"),
        pytest.param(a_silent_job(silent_nodes={"node-1": 30.0}), id="another node"),
        pytest.param(a_silent_job(seen=STEPS), id="the job steps, so it is alive"),
        pytest.param(a_silent_job(seen=HEARD), id="the job hears it"),
        pytest.param(a_silent_job(seen=NEVER_TRAINED), id="no epoch yet"),
        pytest.param(a_silent_job(seen=ANOTHER_ATTEMPT), id="another attempt"),
        pytest.param(replace(a_silent_job(), seen=None), id="no report"),
    ],
)
def test_both_the_lease_and_the_job_must_tell_of_the_silence(observed: Observed) -> None:
    assert yields(observed) == ()
    assert raised(plan(observed, NOW)) == []


def test_a_figure_that_grows_old_because_of_the_silent_member_is_no_obstacle() -> None:
    """A report is as old as the oldest figure in it."""
    assert yields(a_silent_job(seen_age=30.0)) == (YIELD,)


def test_the_limit_is_the_jobs_own() -> None:
    job = a_job(a_spec(recovery={"replaceAfterSeconds": 50}), status=a_status())
    assert yields(a_silent_job(49.0, job=job)) == ()
    assert yields(a_silent_job(50.0, job=job)) == (YIELD,)


def test_all_slots_of_silent_nodes_are_named() -> None:
    """Two of three nodes lose power. The last one may continue alone."""
    silent = (SlotAttempt(slot=1, attempt=1), LOST)
    told = a_seen(members=(), running=False, silent=silent)
    observed = a_silent_job(seen=told, silent_nodes={"node-1": 40.0, "node-2": 40.0})
    assert yields(observed) == (Yield(slot=1, attempt=1, epoch=1), YIELD)


def test_a_job_that_is_being_suspended_may_leave_it_out_too() -> None:
    job = a_job(a_spec(suspend=True), status=a_status())
    wanted = plan(a_silent_job(job=job), NOW).wanted
    assert wanted is not None
    assert (wanted.stop, wanted.yields) == (Stop.SUSPEND, (YIELD,))


# --- what follows -------------------------------------------------------------------------------


def used(**changes: Any) -> Observed:
    """The job has claimed an epoch without slot 2, and does not step yet."""
    told = a_seen(members=((0, 1), (1, 1)), running=False, epoch=2, yielded=(YIELD,))
    return a_silent_job(seen=replace(told, **changes))


def test_once_the_newest_claim_leaves_it_out_its_attempt_rises() -> None:
    planned = plan(used(), NOW)
    assert planned.counts
    (record,) = raised(planned)
    assert (record.slot, record.attempt, record.cause) == (2, 2, "NodeLost")
    assert record.former_node == "node-2"
    (incident,) = planned.status.incidents
    assert (incident.id, incident.slot) == ("nodelost-2-1", 2)
    assert "node-2 has renewed no lease for more than 25 s" in incident.message
    assert "goes on without slot 2" in incident.message
    assert planned.status.restarts is not None
    assert planned.status.restarts.by_cause == {"NodeLost": 1}


def test_it_belongs_to_the_interruption_that_the_job_noticed() -> None:
    lost = RuntimeIncident(id="lm-1", cause="AgentLost", message="slot 2 is silent", slot=2)
    (incident,) = plan(used(incidents=(lost,)), NOW).status.incidents
    assert (incident.id, incident.cause) == ("lm-1", "NodeLost")


def test_the_next_pod_is_not_placed_on_a_silent_node() -> None:
    """For a while the scheduler takes the node for sound. There may be other silent nodes."""
    slots = [a_slot(0), a_slot(1), SlotStatus(slot=2, attempt=2, cause="NodeLost")]
    observed = replace(
        used(),
        job=a_job(status=a_status(slots=slots)),
        silent_nodes={"node-2": 31.0, "node-5": 16.0},
    )
    planned = plan(observed, NOW)
    (made,) = [a for a in planned.actions if isinstance(a, CreatePod)]
    affinity = made.body["spec"]["affinity"]["nodeAffinity"]
    required = affinity["requiredDuringSchedulingIgnoredDuringExecution"]
    fields = [f for term in required["nodeSelectorTerms"] for f in term["matchFields"]]
    assert [f["values"] for f in fields] == [["node-2"], ["node-5"]]
    assert planned.wanted is not None
    assert planned.wanted.gone == (LOST,)
    assert planned.wanted.yields == ()


def test_a_job_that_steps_on_without_it_needs_no_word() -> None:
    """The others were the majority."""
    rest = a_seen(members=((0, 1), (1, 1)), epoch=2)
    (record,) = raised(plan(a_silent_job(seen=rest), NOW))
    assert (record.slot, record.cause) == (2, "NodeLost")
    assert raised(plan(a_silent_job(24.0, seen=rest), NOW)) == []
    assert raised(plan(a_silent_job(seen=rest, silent_nodes={}), NOW)) == []


def test_a_verdict_to_leave_does_not_wait_for_a_pod_that_is_left_out() -> None:
    observed = replace(used(), verdicts={"node-2": a_verdict("node-2", NodeState.LEAVING)})
    (record,) = raised(plan(observed, NOW))
    assert (record.cause, record.incident) == ("NodeLost", "inc-1")


def test_a_node_that_is_back_keeps_its_pod() -> None:
    observed = replace(used(), silent_nodes={})
    assert raised(plan(observed, NOW)) == []
    assert yields(observed) == ()


def test_a_void_word_leaves_the_old_limit() -> None:
    """The silent side claimed first, so the job reports no yield. The node counts as lost later."""
    nodes = {f"node-{s}": NodeFact(name=f"node-{s}") for s in range(3)}
    nodes["node-2"] = NodeFact(name="node-2", not_ready_for=59.0, why="gone")
    assert raised(plan(a_silent_job(110.0, nodes=nodes), NOW)) == []
    nodes["node-2"] = replace(nodes["node-2"], not_ready_for=60.0)
    (record,) = raised(plan(a_silent_job(111.0, nodes=nodes), NOW))
    assert record.cause == "NodeLost"


# --- pending pods -------------------------------------------------------------------------------


def a_pending_job(**changes: Any) -> Observed:
    """The next pod of slot 2 excludes node-2 and finds no other node."""
    pod = a_pod(
        2, 2, phase="Pending", node="", ip="", running_since=None, scheduling="0/3 nodes",
        avoids=frozenset({"node-2"}),
    )  # fmt: skip
    slots = [a_slot(0), a_slot(1), a_slot(2, 2, node=None)]
    return an_observation(
        job=a_job(status=a_status(slots=slots)), pods=(a_pod(0), a_pod(1), pod),
        seen=a_seen(members=((0, 1), (1, 1))), unplaced_for={pod.uid: 100.0}, **changes,
    )  # fmt: skip


def test_a_pending_pod_may_use_the_node_once_that_is_no_longer_silent() -> None:
    assert raised(plan(a_pending_job(silent_nodes={"node-2": 300.0}), NOW))[0].attempt == 2
    (record,) = raised(plan(a_pending_job(), NOW))
    assert (record.attempt, record.cause) == (3, placement.RESCHEDULED)


def test_a_node_that_is_not_ready_is_not_taken_for_free() -> None:
    nodes = {f"node-{s}": NodeFact(name=f"node-{s}") for s in range(3)}
    nodes["node-2"] = NodeFact(name="node-2", not_ready_for=5.0, why="gone")
    (record,) = raised(plan(a_pending_job(nodes=nodes), NOW))
    assert record.attempt == 2


def test_a_pod_names_few_silent_nodes_and_the_newest_first() -> None:
    """Nodes that have been silent for longer have a taint."""
    silent = {f"n{i:03}": 1000.0 - i for i in range(500)}
    found = placement.nodes_left(a_silent_job(silent_nodes=silent))
    assert len(found) == placement.NAMED_NODES
    assert found[0] == "n499"


# --- what is said -------------------------------------------------------------------------------


def why(observed: Observed, now: float = NOW) -> tuple[str, str]:
    found = conditions.find_condition(plan(observed, now).status, "Running")
    assert found is not None
    return found.reason, found.message


def test_the_condition_says_since_when_and_from_when_on_the_job_may_go_on() -> None:
    reason, message = why(a_silent_job(20.0))
    assert reason == "NodeSilent"
    assert "slot 2 waits for node node-2" in message
    assert "not been renewed since 1970-01-12T13:46:20Z while those of other nodes were" in message
    assert (
        "without slot 2 from 1970-01-12T13:46:45Z on (recovery.replaceAfterSeconds: 25)" in message
    )
    assert why(a_silent_job(23.0), NOW + 3.0) == (reason, message), (
        "the message must not change each second"
    )


def test_without_the_jobs_word_it_says_what_kubernetes_will_do() -> None:
    reason, message = why(a_silent_job(20.0, seen=HEARD))
    assert reason == "NodeSilent"
    assert "called it not Ready for 60 s (recovery.nodeLostSeconds)" in message


def test_a_node_that_is_not_ready_and_silent_has_both_limits() -> None:
    nodes = {f"node-{s}": NodeFact(name=f"node-{s}") for s in range(3)}
    nodes["node-2"] = NodeFact(name="node-2", not_ready_for=2.0, why="gone")
    reason, message = why(a_silent_job(20.0, nodes=nodes))
    assert reason == "NodeNotReady"
    assert "recovery.nodeLostSeconds: 60" in message
    assert "recovery.replaceAfterSeconds: 25" in message


def test_a_job_is_looked_at_often_while_a_node_of_it_is_silent() -> None:
    assert plan(an_observation(), NOW).wake_after == QUIET_SECONDS
    assert plan(a_silent_job(16.0, seen=a_seen()), NOW).wake_after == BUSY_SECONDS
    former = a_silent_job(
        job=a_job(status=a_status(slots=[a_slot(0), a_slot(1), a_slot(2, 2)])),
        pods=(*(a_pod(s) for s in range(3)), a_pod(2, 2, node="node-3")),
        seen=a_seen(members=((0, 1), (1, 1), (2, 2))),
    )
    assert plan(former, NOW).wake_after == QUIET_SECONDS

"""Why a job does not run, in the words of the component that knows."""

from dataclasses import replace

import pytest

from everstep_contract.levels import RuntimeIncident
from everstep_operator.jobs.conditions import find_condition
from everstep_operator.jobs.observed import NodeFact, Observed
from everstep_operator.jobs.plan import BUSY_SECONDS, plan
from everstep_operator.model_status import WorldStatus
from job_builders import NOW, a_job, a_pod, a_seen, a_status, an_observation


def away(seconds: float) -> Observed:
    """node-2 has not been Ready for `seconds`, and the job waits for the slot that was there."""
    lost = RuntimeIncident(id="lm-1", cause="AgentLost", message="slot 2 has been silent", slot=2)
    nodes = {f"node-{s}": NodeFact(name=f"node-{s}") for s in range(3)}
    nodes["node-2"] = NodeFact(name="node-2", not_ready_for=seconds, why="Kubelet stopped posting.")
    return an_observation(seen=a_seen(running=False, incidents=(lost,)), nodes=nodes)


def said(observed: Observed, now: float) -> str:
    found = find_condition(plan(observed, now).status, "Running")
    assert found is not None
    return found.message


def test_a_job_that_is_not_heard_is_not_said_to_regroup() -> None:
    """The row for `NoWordFromJob` in TROUBLESHOOTING.md says what to do."""
    planned = plan(short_of_a_pod(seen_age=40.0), NOW)
    recovering = find_condition(planned.status, "Recovering")
    assert recovering is not None
    assert (recovering.status, recovering.reason) == ("True", "NoWordFromJob")
    assert [event.reason for event in planned.events] == ["NoWordFromJob"]


def test_a_node_that_may_come_back_is_waited_for_with_since_when_and_until_when() -> None:
    message = said(away(20.0), NOW)
    assert "slot 2 waits for node node-2" in message
    assert "not been Ready since 1970-01-12T13:46:20Z (Kubelet stopped posting)" in message
    assert "replaced at 1970-01-12T13:47:20Z (recovery.nodeLostSeconds: 60)" in message


def test_the_sentence_does_not_change_while_it_waits() -> None:
    assert said(away(20.0), NOW) == said(away(25.0), NOW + 5.0)


def test_a_job_that_steps_waits_for_nobody() -> None:
    found = find_condition(plan(replace(away(20.0), seen=a_seen()), NOW).status, "Running")
    assert found is not None
    assert found.status == "True"


def short_of_a_pod(**changes: object) -> Observed:
    """Slots 0 and 1 train, and the pod of slot 2 finds no node. No agent answers the operator."""
    observed = an_observation(seen=a_seen(((0, 1), (1, 1))))
    status = observed.job.status.model_copy(
        update={
            "conditions": plan(observed, NOW - 60).status.conditions,
            "world": WorldStatus(ready=2),
        }
    )
    nowhere = {"phase": "Pending", "node": "", "running_since": None, "scheduling": "no room"}
    pods = (a_pod(0), a_pod(1), a_pod(2, **nowhere))
    return replace(observed, job=a_job(status=status), pods=pods, **changes)


def running(observed: Observed) -> tuple[str, str]:
    found = find_condition(plan(observed, NOW).status, "Running")
    assert found is not None
    return found.status, found.reason


def test_a_job_that_trains_without_all_its_pods_keeps_running_while_no_agent_answers() -> None:
    assert running(short_of_a_pod(seen_age=20.0)) == ("True", "Training")
    assert running(short_of_a_pod(seen_age=40.0)) == ("Unknown", "NoWordFromJob")
    ended = {"running_since": None, "waiting": "CrashLoopBackOff"}
    pods = (a_pod(0), a_pod(1, **ended), a_pod(2))
    assert running(replace(short_of_a_pod(seen_age=20.0), pods=pods))[0] == "False"


def test_a_new_operator_that_has_not_asked_the_agents_yet_calls_no_such_job_stopped() -> None:
    assert running(short_of_a_pod(seen=None, callers=frozenset())) == ("True", "Training")


@pytest.mark.parametrize(("epoch", "pause"), [(0, None), (3, BUSY_SECONDS)])
def test_a_job_that_waits_for_nodes_is_woken_by_what_changes(
    epoch: int, pause: float | None
) -> None:
    """A job that has trained also wakes after a pause to ask its agents."""
    nowhere = {"phase": "Pending", "node": "", "ip": "", "running_since": None}
    waiting = an_observation(
        job=a_job(status=a_status(epoch=epoch)),
        pods=tuple(a_pod(s, **nowhere) for s in range(3)),
        seen=None,
        callers=frozenset(),
    )
    assert plan(waiting, NOW).wake_after == pause

"""Pods that do not start are replaced on another node, up to a limit, even late in a job."""

from dataclasses import replace
from typing import Any

import pytest

from everstep_contract import report
from everstep_operator.jobs import conditions, starts
from everstep_operator.jobs.actions import CreatePod, Plan
from everstep_operator.jobs.observed import NodeFact, Observed
from everstep_operator.jobs.plan import plan
from everstep_operator.jobs.stamps import to_stamp
from everstep_operator.model_status import JobStatus, SlotStatus, StartFailure
from job_builders import (
    NOW,
    a_job,
    a_pod,
    a_seen,
    a_slot,
    a_spec,
    a_status,
    an_end,
    an_observation,
)

LIMIT = 600
WORDS = "Pod was rejected: Allocate failed due to requested number of devices unavailable"


def with_pod(observed: Observed, slot: int, **changes: Any) -> Observed:
    pods = tuple(replace(p, **changes) if p.slot == slot else p for p in observed.pods)
    return replace(observed, pods=pods)


def not_up(*, seconds: float = LIMIT + 1, **pod: Any) -> Observed:
    """A job that has trained. The new pod of slot 1 has not started on node-4 for `seconds`."""
    slots = [a_slot(0), a_slot(1, 2, node="node-4"), a_slot(2)]
    fresh = a_pod(1, 2, phase="Pending", node="node-4", running_since=None)
    return an_observation(
        job=a_job(status=a_status(slots=slots)),
        pods=(a_pod(0), replace(fresh, **pod), a_pod(2)),
        seen=a_seen(((0, 1), (2, 1)), running=False),
        callers=frozenset({"uid-0-1", "uid-2-1"}),
        starting_for={"uid-1-2": seconds},
    )


def refused(**changes: Any) -> Observed:
    pod: dict[str, Any] = {
        "phase": "Failed", "reason": "UnexpectedAdmissionError", "message": WORDS, "running_since": None,
        "created_at": NOW,
    }  # fmt: skip
    seen = a_seen(((0, 1), (2, 1)), running=False)
    return with_pod(an_observation(seen=seen), 1, **{**pod, **changes})


def attempts(planned: Plan) -> list[int]:
    return [record.attempt for record in planned.status.slots]


def after(observed: Observed, planned: Plan, **changes: Any) -> Observed:
    return replace(observed, job=replace(observed.job, status=planned.status), **changes)


def shut_out(planned: Plan, slot: int = 1) -> list[str]:
    """Nodes on which the slot's next pod must not be placed."""
    (made,) = [a for a in planned.actions if isinstance(a, CreatePod) and a.slot == slot]
    node = made.body["spec"].get("affinity", {}).get("nodeAffinity", {})
    terms = node.get("requiredDuringSchedulingIgnoredDuringExecution", {}).get("nodeSelectorTerms")
    return [v for f in (terms or [{}])[0].get("matchFields", []) for v in f["values"]]


def a_failure(node: str, age: float = 10.0, reason: str = "ContainerCreating") -> StartFailure:
    return StartFailure(node=node, at=to_stamp(NOW - age), reason=reason)


# --- the limit --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pod",
    [
        {"waiting": "ContainerCreating"},
        {"waiting": "CrashLoopBackOff", "restarts": 7, "last_ended": an_end(code=1)},
        {"waiting": "RunContainerError", "waiting_message": "nvidia-container-cli: driver error"},
        {"waiting": "ImagePullBackOff", "waiting_message": "no route to host"},
    ],
    ids=lambda pod: pod["waiting"],
)
def test_a_pod_that_does_not_come_up_after_the_first_epoch_is_replaced_elsewhere(
    pod: dict[str, Any],
) -> None:
    early = plan(not_up(seconds=LIMIT - 1, **pod), NOW)
    assert not early.counts
    counted = plan(not_up(**pod), NOW)
    assert attempts(counted) == [1, 3, 1]
    record = counted.status.slots[1]
    assert record.cause == "PodNotStarted"
    assert [f.node for f in record.start_failures] == ["node-4"]
    (event,) = [e for e in counted.events if e.reason == "PodNotStarted"]
    assert "within 600 s (recovery.startupSeconds)" in event.message
    assert "node-4" in shut_out(plan(after(not_up(**pod), counted), NOW + 1))


def test_before_the_first_epoch_it_is_replaced_too() -> None:
    observed = not_up(waiting="ContainerCreating")
    status = JobStatus(slots=observed.job.status.slots)
    fresh = replace(observed, job=a_job(status=status), seen=None)
    assert attempts(plan(fresh, NOW)) == [1, 3, 1]


def test_a_container_whose_agent_alone_does_not_answer_is_replaced() -> None:
    silent = not_up(phase="Running", running_since=NOW - 700, node="node-4")
    assert not plan(silent, NOW).counts, "the operator has not asked it yet"
    asked = replace(silent, asked_for={"uid-1-2": LIMIT + 1.0})
    assert attempts(plan(asked, NOW)) == [1, 3, 1]
    nobody = replace(asked, seen=None, callers=frozenset())
    assert not plan(nobody, NOW).counts, "no agent answers, so the fault may be the operator's"


def test_an_agent_that_has_called_is_waited_for_as_long_as_the_job_waits() -> None:
    up = not_up(phase="Running", running_since=NOW - 700, seconds=9999)
    assert not plan(replace(up, callers=up.callers | {"uid-1-2"}), NOW).counts


def test_a_node_without_heartbeats_is_judged_by_its_own_limit() -> None:
    observed = not_up(waiting="ContainerCreating")
    away = {**observed.nodes, "node-4": NodeFact(name="node-4", not_ready_for=20.0)}
    assert not plan(replace(observed, nodes=away), NOW).counts


def test_a_pod_that_never_came_up_is_no_interruption() -> None:
    planned = plan(not_up(waiting="ContainerCreating"), NOW)
    assert planned.status.restarts is not None
    assert planned.status.restarts.total == 0


def test_a_node_on_which_a_job_s_first_pod_cannot_start_does_not_fail_the_job() -> None:
    """Two of the job's agents have called, so the image and the command are good."""
    words = {"waiting": "CrashLoopBackOff", "restarts": 9, "last_ended": an_end(code=128)}
    observed = not_up(seconds=5, **words)
    fresh = replace(
        observed, job=a_job(status=JobStatus(slots=observed.job.status.slots)), seen=None
    )
    failed = conditions.find_condition(plan(fresh, NOW).status, "Failed")
    assert failed is not None
    assert failed.status == "False"


# --- an agent that cannot use its settings ---------------------------------------------------------------


def misconfigured(**changes: Any) -> Observed:
    """The folder of the store is not mounted on the node of slot 1's new pod."""
    ended = an_end(report.Cause.CONFIG, "there is no folder /nfs/runs")
    over = {"phase": "Succeeded", "running_since": None, "ended": ended, "created_at": NOW - 15}
    return replace(not_up(seconds=0, **over), **changes)


@pytest.mark.parametrize("running", [True, False])
def test_a_node_on_which_the_settings_do_not_work_does_not_end_a_job_whose_other_pods_have_started(
    running: bool,
) -> None:
    observed = misconfigured(seen=a_seen(((0, 1), (2, 1)), running=running))
    planned = plan(observed, NOW)
    assert planned.status.state != "Failed"
    assert attempts(planned) == [1, 3, 1]
    assert [f.reason for f in planned.status.slots[1].start_failures] == ["BadConfiguration"]
    (event,) = [e for e in planned.events if e.reason == "PodNotStarted"]
    assert "there is no folder /nfs/runs" in event.message
    assert "node-4" in shut_out(plan(after(observed, planned), NOW + 1))


def test_the_next_attempt_is_made_after_a_pause() -> None:
    early = misconfigured()
    pods = tuple(replace(p, created_at=NOW - 5) if p.slot == 1 else p for p in early.pods)
    planned = plan(replace(early, pods=pods), NOW)
    assert attempts(planned) == [1, 2, 1]
    found = conditions.find_condition(planned.status, "Running")
    assert found is not None
    assert found.message.startswith("pod lm-1-2: there is no folder /nfs/runs")


def test_the_settings_work_although_an_operator_that_has_just_started_has_heard_nobody_yet() -> (
    None
):
    planned = plan(misconfigured(seen=None, callers=frozenset()), NOW)
    assert attempts(planned) == [1, 3, 1]


@pytest.mark.parametrize(("asked", "state"), [(29.0, "Starting"), (31.0, "Failed")])
def test_settings_with_which_no_pod_starts_end_the_job(asked: float, state: str) -> None:
    """The other two pods run, and have not answered for so long."""
    observed = misconfigured(seen=None, callers=frozenset())
    status = JobStatus(slots=observed.job.status.slots)
    asked_for = {"uid-0-1": asked, "uid-2-1": asked}
    planned = plan(replace(observed, job=a_job(status=status), asked_for=asked_for), NOW)
    assert planned.status.state == state
    assert "there is no folder /nfs/runs" in (planned.status.message or "")
    assert attempts(planned) == [1, 2, 1]


def failing_alone(epoch: int = 0) -> Observed:
    """The script of slot 1's new pod cannot download its data set."""
    ended = an_end(report.Cause.SCRIPT_ERROR, "Name or service not known", epoch=epoch)
    over = {"phase": "Succeeded", "running_since": None, "ended": ended, "created_at": NOW - 15}
    return not_up(seconds=0, **over)


def test_a_script_that_fails_in_one_new_pod_does_not_end_a_job_that_has_trained_with_it() -> None:
    observed = failing_alone()
    planned = plan(observed, NOW)
    assert planned.status.state != "Failed"
    assert attempts(planned) == [1, 3, 1]
    assert [f.reason for f in planned.status.slots[1].start_failures] == ["ScriptError"]
    (event,) = [e for e in planned.events if e.reason == "PodNotStarted"]
    assert "Name or service not known" in event.message
    assert "node-4" in shut_out(plan(after(observed, planned), NOW + 1))


def test_the_report_of_a_former_pod_whose_script_failed_alone_does_not_end_the_job() -> None:
    """Its node was cut off, and is back."""
    observed = an_observation()
    (former,) = (p for p in failing_alone().pods if p.slot == 1)
    former = replace(former, attempt=0, name="lm-1-0", uid="uid-1-0", deleting_until=NOW)
    planned = plan(replace(observed, pods=(*observed.pods, former)), NOW)
    assert planned.status.state == "Running"
    assert attempts(planned) == [1, 1, 1]


def test_a_script_that_fails_in_every_pod_ends_the_job() -> None:
    observed = failing_alone()
    ended = observed.pods[1].ended
    pods = tuple(
        replace(p, phase="Succeeded", running_since=None, ended=ended) for p in observed.pods
    )
    assert plan(replace(observed, pods=pods), NOW).status.state == "Failed"


def test_a_script_that_fails_in_pods_that_were_all_made_anew_ends_the_job() -> None:
    """The job was suspended, its command was edited, and it was resumed."""
    observed = failing_alone()
    pods = tuple(replace(p, running_since=NOW - 5) if p.slot != 1 else p for p in observed.pods)
    assert plan(replace(observed, pods=pods), NOW).status.state == "Failed"


def test_a_former_pod_ends_no_job_whose_containers_start_again() -> None:
    (former,) = (p for p in failing_alone().pods if p.slot == 1)
    former = replace(former, attempt=0, name="lm-1-0", uid="uid-1-0", deleting_until=NOW)
    down = {"running_since": None, "waiting": "CrashLoopBackOff"}
    observed = an_observation(seen=a_seen(running=False))
    pods = tuple(replace(p, **down) for p in observed.pods)
    assert plan(replace(observed, pods=(*pods, former)), NOW).status.state != "Failed"


def test_a_script_that_fails_in_an_epoch_ends_the_job() -> None:
    assert plan(failing_alone(epoch=1), NOW).status.state == "Failed"


# --- a kubelet that refuses -------------------------------------------------------------------------------


def test_a_pod_that_its_node_refuses_goes_elsewhere_after_a_moment() -> None:
    observed = refused()
    at_once = plan(observed, NOW + 1)
    assert not at_once.counts
    running = conditions.find_condition(at_once.status, "Running")
    assert running is not None
    assert WORDS in running.message
    counted = plan(observed, NOW + 11)
    assert attempts(counted) == [1, 2, 1]
    assert counted.status.slots[1].cause == "PodRefusedByNode"
    assert counted.status.restarts is not None
    assert counted.status.restarts.total == 0
    assert shut_out(plan(after(observed, counted), NOW + 12)) == ["node-1"]


def test_each_refusal_doubles_the_wait_for_the_next_attempt() -> None:
    observed = refused()
    pauses = []
    for number in range(8):
        failures = [
            a_failure(f"node-{n}", reason="UnexpectedAdmissionError") for n in range(number)
        ]
        job = a_job(
            status=a_status(slots=[a_slot(0), a_slot(1, start_failures=failures), a_slot(2)])
        )
        tried = replace(observed, job=job)
        pauses.append(next(s for s in range(1000) if plan(tried, NOW + s).counts))
    assert pauses == [10, 20, 40, 80, 160, 300, 300, 300]


def test_a_clock_that_goes_an_hour_ahead_holds_no_replacement_back() -> None:
    assert attempts(plan(refused(created_at=NOW + 3600), NOW)) == [1, 2, 1]


def test_an_eviction_of_a_pod_that_ran_is_not_a_refusal() -> None:
    evicted = refused(reason="Evicted", ended=an_end(code=137))
    assert plan(evicted, NOW).status.slots[1].cause == "PodEvicted"


# --- the node ---------------------------------------------------------------------------------------------


def slots_with(*failures: tuple[int, StartFailure]) -> tuple[SlotStatus, ...]:
    return tuple(
        a_slot(s, start_failures=[f for slot, f in failures if slot == s]) for s in range(3)
    )


def failed(records: tuple[SlotStatus, ...], record: SlotStatus) -> frozenset[str]:
    return starts.find_failed(starts.list_shared(records, NOW), record, NOW)


def test_a_node_on_which_pods_of_two_slots_failed_is_avoided_by_all() -> None:
    records = slots_with(
        (0, a_failure("node-4")), (1, a_failure("node-4")), (1, a_failure("node-5"))
    )
    assert failed(records, records[2]) == {"node-4"}
    assert failed(records, records[1]) == {"node-4", "node-5"}
    assert starts.count_by_node(records, NOW) == {"node-4": 2, "node-5": 1}


def test_a_failure_is_forgotten_after_an_hour() -> None:
    records = slots_with((0, a_failure("node-4", 3601)), (1, a_failure("node-4", 3599)))
    assert starts.count_by_node(records, NOW) == {"node-4": 1}
    assert failed(records, records[0]) == frozenset()


def test_an_image_that_cannot_be_pulled_speaks_against_the_template_and_not_the_node() -> None:
    image = a_failure("node-4", reason="ImagePullBackOff")
    records = slots_with((0, image), (1, image))
    assert starts.count_by_node(records, NOW) == {}
    assert failed(records, records[2]) == frozenset()
    assert failed(records, records[0]) == {"node-4"}, "another node may have the image"


def test_only_the_newest_failures_of_a_slot_are_kept() -> None:
    record = a_slot(0, start_failures=[a_failure(f"node-{n}", 100 - n) for n in range(8)])
    noted = starts.note_failure(record, "node-9", "ContainerCreating", NOW)
    assert [f.node for f in noted] == [*(f"node-{n}" for n in range(1, 8)), "node-9"]


def test_a_pod_that_finds_no_other_node_may_use_the_one_that_failed() -> None:
    """It may use it after a pause that doubles, because a node that failed once is better than none."""
    failed = a_slot(1, 2, node=None, start_failures=[a_failure("node-4")], cause="PodNotStarted")
    status = a_status(slots=[a_slot(0), failed, a_slot(2)])
    nowhere = {"node": "", "phase": "Pending", "running_since": None, "scheduling": "no room"}
    observed = an_observation(
        job=a_job(status=status), seen=a_seen(running=False),
        pods=(a_pod(0), a_pod(1, 2, avoids=frozenset({"node-4"}), **nowhere), a_pod(2)),
    )  # fmt: skip
    assert not plan(replace(observed, unplaced_for={"uid-1-2": 59.0}), NOW).counts
    counted = plan(replace(observed, unplaced_for={"uid-1-2": 61.0}), NOW)
    assert attempts(counted) == [1, 3, 1]
    assert counted.status.slots[1].cause == "Rescheduled"
    assert [f.node for f in counted.status.slots[1].start_failures] == ["node-4"], (
        "the failure must not be forgotten"
    )
    assert shut_out(plan(after(observed, counted), NOW + 1)) == []


def test_the_spec_sets_the_limit() -> None:
    observed = not_up(waiting="ContainerCreating", seconds=6)
    job = a_job(a_spec(recovery={"startupSeconds": 5}), status=observed.job.status)
    assert attempts(plan(replace(observed, job=job), NOW)) == [1, 3, 1]

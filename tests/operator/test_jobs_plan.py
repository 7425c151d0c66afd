"""The decisions of a pass: `plan` called on plain values."""

from dataclasses import replace
from typing import Any

import pytest

from everstep_contract import levels
from everstep_contract.report import Cause
from everstep_operator.jobs import conditions, statuspatch
from everstep_operator.jobs.actions import (
    CheckTemplate,
    CreatePod,
    CreateSecret,
    DeleteJob,
    DeletePod,
    Plan,
)
from everstep_operator.jobs.observed import NodeFact, Observed, Refusal
from everstep_operator.jobs.plan import plan
from everstep_operator.jobs.stamps import to_stamp
from everstep_operator.model_status import CheckpointStatus, Condition, JobStatus, SlotStatus
from everstep_operator.values import GonePods, NodeState
from job_builders import (
    NOW,
    TEMPLATE,
    a_job,
    a_left,
    a_pod,
    a_seen,
    a_slot,
    a_spec,
    a_status,
    a_verdict,
    an_end,
    an_observation,
)


def condition(planned: Plan, kind: str) -> Condition:
    found = conditions.find_condition(planned.status, kind)
    assert found is not None
    return found


def attempts(planned: Plan) -> list[int]:
    return [record.attempt for record in planned.status.slots]


def creations(planned: Plan) -> list[CreatePod]:
    return [action for action in planned.actions if isinstance(action, CreatePod)]


def a_condition(kind: str, reason: str, age: float = 0.0, message: str = "m") -> Condition:
    return Condition(
        type=kind, status="True", reason=reason, message=message,
        last_transition_time=to_stamp(NOW - age), observed_generation=1,
    )  # fmt: skip


def with_pod(observed: Observed, slot: int, **changes: Any) -> Observed:
    pods = tuple(replace(p, **changes) if p.slot == slot else p for p in observed.pods)
    return replace(observed, pods=pods)


def with_verdict(observed: Observed, slot: int, state: NodeState) -> Observed:
    node = f"node-{slot}"
    return replace(observed, verdicts={node: a_verdict(node, state)})


# --- starting ---------------------------------------------------------------------------------------------


def test_a_new_job_gets_its_secret_a_dry_run_and_a_pod_for_each_slot() -> None:
    planned = plan(an_observation(job=a_job(), pods=(), seen=None, template_checked=False), NOW)
    assert [type(a) for a in planned.actions] == [CreateSecret, CheckTemplate, *[CreatePod] * 3]
    assert [a.body["metadata"]["name"] for a in planned.actions if isinstance(a, CreatePod)] == [
        "lm-0-1", "lm-1-1", "lm-2-1",
    ]  # fmt: skip
    assert planned.status.state == "Pending"
    assert attempts(planned) == [1, 1, 1]


def test_a_template_that_the_server_refuses_is_told_in_its_words_and_not_tried_again_at_once() -> (
    None
):
    refusal = Refusal(
        invalid=True, message='Pod "lm-0-1" is invalid: spec…', generation=1, at=NOW - 40
    )
    observed = an_observation(job=a_job(), pods=(), seen=None, refusal=refusal)
    planned = plan(observed, NOW)
    assert planned.actions == ()
    assert (condition(planned, "Running").reason, condition(planned, "Running").message) == (
        "TemplateInvalid", refusal.message,
    )  # fmt: skip
    edited = replace(observed, job=replace(observed.job, generation=2))
    assert any(isinstance(a, CreatePod) for a in plan(edited, NOW).actions)


def test_a_quota_is_asked_again_after_a_while() -> None:
    refusal = Refusal(invalid=False, message="exceeded quota", generation=1, at=NOW - 10)
    observed = an_observation(job=a_job(), pods=(), seen=None, refusal=refusal)
    assert condition(plan(observed, NOW), "Running").reason == "PodRefused"
    assert any(isinstance(a, CreatePod) for a in plan(observed, NOW + 30).actions)
    assert any(isinstance(a, CreatePod) for a in plan(observed, NOW - 3600).actions), "set back"


def resized(missing: int) -> Observed:
    """A job of three that was resized to four: the pod of slot `missing` does not exist."""
    trains = [s for s in range(4) if s != missing]
    slots = [a_slot(s) if s in trains else SlotStatus(slot=s, attempt=1) for s in range(4)]
    workers = {"replicas": 4, "minReplicas": 2, "template": TEMPLATE}
    return an_observation(
        job=a_job(a_spec(workers=workers), status=a_status(slots=slots)),
        pods=tuple(a_pod(s) for s in trains),
        seen=a_seen([(s, 1) for s in trains]),
    )


def with_loss(observed: Observed, slot: int) -> Observed:
    """The node of a slot is gone, and the slot's next attempt is counted."""
    gone = with_verdict(observed, slot, NodeState.GONE)
    return replace(gone, job=replace(gone.job, status=plan(gone, NOW).status))


def test_a_refused_pod_of_a_resize_holds_back_no_pod_that_replaces_a_lost_one() -> None:
    refusal = Refusal(invalid=False, message="exceeded quota", generation=1, at=NOW - 5)
    grows = replace(resized(missing=3), refusal=refusal)
    assert creations(plan(grows, NOW)) == []
    lost = with_loss(grows, 1)
    assert [a.slot for a in creations(plan(lost, NOW))] == [1]
    assert [a.slot for a in creations(plan(lost, NOW + 25))] == [1, 3]


def test_a_pod_that_replaces_a_lost_one_comes_before_the_pods_of_a_resize() -> None:
    lost = with_loss(resized(missing=1), 3)
    assert [(a.slot, a.urgent) for a in creations(plan(lost, NOW))] == [(3, True), (1, False)]


def test_a_refused_pod_that_replaces_a_lost_one_holds_back_all() -> None:
    """A quota that has room again must not go to a pod of a resize."""
    refusal = Refusal(
        invalid=False, message="exceeded quota", generation=1, at=NOW - 1.5, urgent=True
    )
    lost = replace(with_loss(resized(missing=1), 3), refusal=refusal)
    waits = plan(lost, NOW)
    assert creations(waits) == []
    assert waits.wake_after == pytest.approx(0.5)
    assert [a.slot for a in creations(plan(lost, NOW + 0.5))] == [3, 1]


def test_the_dry_run_is_that_of_the_first_pod_to_be_created() -> None:
    grows = replace(resized(missing=1), template_checked=False)
    for observed, name, urgent in ((grows, "lm-1-1", False), (with_loss(grows, 3), "lm-3-2", True)):
        (check,) = [a for a in plan(observed, NOW).actions if isinstance(a, CheckTemplate)]
        assert (check.body["metadata"]["name"], check.urgent) == (name, urgent)


@pytest.mark.parametrize(
    ("changes", "reason", "words"),
    [
        (
            {"waiting": "ImagePullBackOff", "waiting_message": "no such image"},
            "ImagePullBackOff",
            "no such image",
        ),
        (
            {"phase": "Pending", "node": "", "scheduling": "0/4 nodes are available"},
            "Unschedulable",
            "0/4 nodes",
        ),
    ],
)
def test_what_kubelet_and_scheduler_say_is_in_the_condition(
    changes: dict[str, Any], reason: str, words: str
) -> None:
    fresh = an_observation(
        job=a_job(status=JobStatus(slots=[a_slot(s) for s in range(3)])), seen=None
    )
    planned = plan(with_pod(fresh, 1, running_since=None, **changes), NOW)
    assert condition(planned, "Running").reason == reason
    assert words in condition(planned, "Running").message


def test_a_template_that_clashes_with_ours_is_refused_by_name() -> None:
    spec = a_spec()
    container = {
        **spec["workers"]["template"]["spec"]["containers"][0],
        "env": [{"name": "EVERSTEP_SLOT"}],
    }
    spec["workers"] = {**spec["workers"], "template": {"spec": {"containers": [container]}}}
    planned = plan(an_observation(job=a_job(spec), pods=(), seen=None), NOW)
    assert planned.actions == ()
    assert condition(planned, "Running").reason == "TemplateConflict"
    assert "EVERSTEP_SLOT" in condition(planned, "Running").message


# --- running ----------------------------------------------------------------------------------------------


def test_a_job_that_trains_is_left_alone() -> None:
    planned = plan(an_observation(), NOW)
    assert planned.actions == ()
    assert condition(planned, "Running").status == "True"
    assert planned.status.world is not None
    assert planned.status.world.summary == "3/3"
    assert planned.wanted is not None
    assert planned.wanted.leave == ()
    assert [p.address for p in planned.wanted.peers] == [
        "10.0.0.1:7070",
        "10.0.0.2:7070",
        "10.0.0.3:7070",
    ]


def test_an_operator_that_has_just_started_changes_no_condition_of_a_job_that_runs() -> None:
    running = plan(an_observation(), NOW).status
    observed = an_observation(seen=None, callers=frozenset())
    again = plan(replace(observed, job=replace(observed.job, status=running)), NOW + 5)
    assert again.actions == ()
    assert condition(again, "Running") == conditions.find_condition(running, "Running")


def test_a_container_that_the_kubelet_ended_is_told_as_dead() -> None:
    planned = plan(with_pod(an_observation(), 1, restarts=2), NOW)
    assert planned.wanted is not None
    assert planned.wanted.dead == (levels.DeadAgent(slot=1, attempt=1, incarnation=2),)


def test_a_commit_is_dated_once() -> None:
    first = plan(an_observation(), NOW).status
    later = an_observation(
        seen=a_seen(committed=levels.CheckpointRef(epoch=1, step=25, age_ms=9900))
    )
    second = plan(replace(later, job=replace(later.job, status=first)), NOW + 7).status
    assert first.checkpoint is not None
    assert second.checkpoint is not None
    assert first.checkpoint.committed_at == second.checkpoint.committed_at == to_stamp(NOW - 3)
    assert second.checkpoint.age_seconds == 10


def test_the_step_that_is_kept_in_memory_is_told_while_the_job_runs() -> None:
    status = a_status(kept_step=10)
    for seen, told in [
        (a_seen(kept_step=25), 25),
        (a_seen(kept_step=0), None),
        (a_seen(kept_step=25, running=False), None),
    ]:
        found = plan(an_observation(job=a_job(status=status), seen=seen), NOW).status
        assert found.kept_step == told


def test_a_new_coordinator_that_has_not_read_the_log_yet_takes_no_figure_back() -> None:
    held = CheckpointStatus(step=500, epoch=2, committed_at=to_stamp(NOW - 9))
    status = a_status(step=547, checkpoint=held)
    early = a_seen(
        epoch=3, running=False, step=0, committed=levels.CheckpointRef(epoch=2, step=200)
    )
    told = plan(an_observation(job=a_job(status=status), seen=early), NOW).status
    assert told.checkpoint is not None
    assert (told.step, told.checkpoint.step, told.checkpoint.age_seconds) == (547, 500, 9)
    resumed = replace(early, running=True, step=200)
    assert plan(an_observation(job=a_job(status=status), seen=resumed), NOW).status.step == 200


def test_a_job_that_goes_back_behind_a_broken_checkpoint_no_longer_shows_it() -> None:
    """Otherwise status says that nothing is unsaved until the next commit."""
    held = CheckpointStatus(step=500, epoch=2, committed_at=to_stamp(NOW - 9))
    older = levels.CheckpointRef(epoch=2, step=200)
    seen = a_seen(epoch=3, step=210, committed=older)
    shown = plan(an_observation(job=a_job(status=a_status(checkpoint=held)), seen=seen), NOW).status
    assert shown.checkpoint is not None
    assert shown.checkpoint.step == 200
    again = a_seen(epoch=3, step=547, committed=older)
    later = plan(an_observation(job=a_job(status=shown), seen=again), NOW).status
    assert later.checkpoint is not None
    assert later.checkpoint.step == 200


# --- a node with a verdict or without heartbeats ----------------------------------------------------------


def test_a_verdict_leaving_asks_the_job_and_deletes_nothing() -> None:
    planned = plan(with_verdict(an_observation(), 1, NodeState.LEAVING), NOW)
    assert planned.actions == ()
    assert not planned.counts
    assert planned.wanted is not None
    assert planned.wanted.leave == (1,)
    assert planned.wanted.incident == "inc-1"
    assert planned.status.slots[1].leaving_since == to_stamp(NOW)
    found = condition(planned, "Recovering")
    (event,) = [e for e in planned.events if e.reason == "NodeLeaving"]
    assert (event.reason, event.message) == (found.reason, found.message), (
        "Event and condition must say the same"
    )
    assert found.reason == "NodeLeaving"
    assert found.message.endswith("[inc-1]")


def test_a_slot_that_has_left_is_counted_first() -> None:
    observed = with_verdict(an_observation(seen=a_seen(left=(a_left(1),))), 1, NodeState.LEAVING)
    planned = plan(observed, NOW)
    assert planned.counts
    assert planned.actions == ()
    assert planned.wanted is None
    assert attempts(planned) == [1, 2, 1]
    assert planned.status.restarts is not None
    assert planned.status.restarts.by_cause == {"NodeLeaving": 1}


def test_after_the_count_the_old_pod_goes_and_the_new_one_avoids_the_node() -> None:
    observed = with_verdict(an_observation(seen=a_seen(left=(a_left(1),))), 1, NodeState.LEAVING)
    counted = plan(observed, NOW).status
    planned = plan(replace(observed, job=replace(observed.job, status=counted)), NOW + 1)
    delete, create = planned.actions
    assert isinstance(delete, DeletePod)
    assert (delete.name, delete.uid, delete.force) == ("lm-1-1", "uid-1-1", False)
    assert isinstance(create, CreatePod)
    terms = create.body["spec"]["affinity"]["nodeAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]
    assert terms["nodeSelectorTerms"][0]["matchFields"] == [
        {"key": "metadata.name", "operator": "NotIn", "values": ["node-1"]}
    ]
    assert planned.wanted is not None
    assert planned.wanted.gone == (levels.SlotAttempt(slot=1, attempt=1),)


def test_only_what_a_fault_took_may_use_the_writes_reserved_for_recoveries() -> None:
    first = plan(an_observation(job=a_job(), pods=(), seen=None), NOW)
    assert [a.urgent for a in creations(first)] == [False] * 3
    observed = with_verdict(an_observation(), 1, NodeState.GONE)
    counted = plan(observed, NOW)
    lost = replace(observed, job=replace(observed.job, status=counted.status))
    actions = [a for a in plan(lost, NOW).actions if isinstance(a, CreatePod | DeletePod)]
    assert [(type(a), a.slot, a.urgent) for a in actions] == [
        (DeletePod, 1, True),
        (CreatePod, 1, True),
    ]
    stopped = suspended(seen=a_seen(running=False, stopped=levels.Stopped(epoch=1, step=42)))
    stopped = replace(stopped, job=replace(stopped.job, status=plan(stopped, NOW).status))
    ended = [a for a in plan(stopped, NOW).actions if isinstance(a, DeletePod)]
    assert [a.urgent for a in ended] == [False] * 3


def test_gone_skips_the_asking() -> None:
    planned = plan(with_verdict(an_observation(), 1, NodeState.GONE), NOW)
    assert planned.counts
    assert attempts(planned) == [1, 2, 1]


def test_gone_of_one_gpu_lets_the_neighbour_on_the_node_save_first() -> None:
    observed = an_observation(pods=tuple(a_pod(s, node="node-1") for s in range(3)))
    verdict = a_verdict("node-1", NodeState.GONE, gone_pods=GonePods(holders=("team/lm-0-1",)))
    planned = plan(replace(observed, verdicts={"node-1": verdict}), NOW)
    assert attempts(planned) == [2, 1, 1]


def test_a_suspicion_moves_nobody_while_the_epoch_runs_and_holds_the_slot_out_of_the_next() -> None:
    observed = with_verdict(an_observation(), 1, NodeState.SUSPECT)
    planned = plan(observed, NOW)
    assert planned.wanted is not None
    assert planned.wanted.leave == ()
    planned = plan(replace(observed, seen=a_seen(running=False)), NOW)
    assert planned.wanted is not None
    assert (planned.wanted.leave, planned.wanted.hold) == ((), (1,))
    assert attempts(planned) == [1, 1, 1]


@pytest.mark.parametrize(
    ("asked", "cause", "restarts"), [(False, "PodLeft", 1), (True, "LeaveWithdrawn", 0)]
)
def test_a_slot_that_has_left_and_is_wanted_gets_a_new_pod(
    asked: bool, cause: str, restarts: int
) -> None:
    left = replace(a_left(1), asked=asked)
    planned = plan(an_observation(seen=a_seen(left=(left,))), NOW)
    assert attempts(planned) == [1, 2, 1]
    assert planned.status.slots[1].cause == cause
    assert planned.status.restarts is not None
    assert planned.status.restarts.total == restarts


def test_an_operator_that_has_not_looked_yet_takes_no_reason_for_gone() -> None:
    observed = an_observation(seen=a_seen(left=(a_left(1),)))
    assert attempts(plan(replace(observed, judged=False), NOW)) == [1, 1, 1]


def test_an_operator_that_has_not_looked_yet_withdraws_no_request_to_leave() -> None:
    observed = with_verdict(an_observation(), 1, NodeState.LEAVING)
    asked = plan(observed, NOW)
    restarted = replace(
        observed, job=replace(observed.job, status=asked.status), verdicts={}, judged=False
    )
    planned = plan(restarted, NOW + 100)
    assert planned.wanted is not None
    assert planned.wanted.leave == (1,)
    assert planned.status.slots == asked.status.slots, "the time limit of the drain goes on"
    assert planned.status.state == "Recovering"
    assert planned.events == ()
    healthy = plan(replace(restarted, judged=True), NOW + 101)
    assert healthy.wanted is not None
    assert healthy.wanted.leave == ()


def test_unknown_is_no_reason_to_act() -> None:
    quiet = plan(with_verdict(an_observation(), 1, NodeState.UNKNOWN), NOW)
    assert quiet.actions == ()
    assert quiet.wanted is not None
    assert quiet.wanted.leave == ()


def test_state_that_others_hold_leaves_without_a_commit_after_the_drain_time_and_says_so() -> None:
    observed = with_verdict(an_observation(), 1, NodeState.LEAVING)
    status = a_status(slots=[a_slot(0), a_slot(1, leaving_since=to_stamp(NOW - 121)), a_slot(2)])
    planned = plan(replace(observed, job=replace(observed.job, status=status)), NOW)
    assert attempts(planned) == [1, 2, 1]
    assert condition(planned, "CheckpointHealthy").reason == "LeftWithoutCommit"


def test_a_leader_whose_clock_is_ahead_ends_no_drain_early() -> None:
    """It has taken over three seconds ago; the clock of the leader that asked is minutes behind."""
    asked = a_slot(1, leaving_since=to_stamp(NOW - 500))
    job = a_job(status=a_status(slots=[a_slot(0), asked, a_slot(2)]))
    observed = with_verdict(an_observation(job=job), 1, NodeState.LEAVING)
    early = plan(replace(observed, leaving_for={(1, 1): 3.0}), NOW)
    assert attempts(early) == [1, 1, 1]
    assert early.wanted is not None
    assert early.wanted.leave == (1,)
    assert attempts(plan(replace(observed, leaving_for={(1, 1): 121.0}), NOW)) == [1, 2, 1]


def test_state_that_nobody_else_holds_stays() -> None:
    observed = an_observation(
        verdicts={f"node-{s}": a_verdict(f"node-{s}", NodeState.LEAVING) for s in range(3)}
    )
    slots = [a_slot(s, leaving_since=to_stamp(NOW - 500)) for s in range(3)]
    planned = plan(replace(observed, job=replace(observed.job, status=a_status(slots=slots))), NOW)
    assert attempts(planned) == [1, 1, 1]
    assert planned.wanted is not None
    assert planned.wanted.leave == (0, 1, 2)


def drained(*, shard: int = 1, replicas: int = 2, **changes: Any) -> Plan:
    """The plan for a job whose slot 0 has been asked for too long to save and leave."""
    waiting = a_slot(0, leaving_since=to_stamp(NOW - 121))
    slots = [waiting, *(a_slot(s) for s in range(1, replicas))]
    spec = a_spec(replicas=replicas, parallelism={"shard": shard})
    observed = an_observation(
        job=a_job(spec, status=a_status(slots=slots)),
        pods=tuple(a_pod(s) for s in range(replicas)),
        seen=a_seen([(s, 1) for s in range(replicas)]),
        **changes,
    )
    return plan(with_verdict(observed, 0, NodeState.LEAVING), NOW)


def test_the_rest_of_a_sharded_copy_is_no_other_copy_of_the_state() -> None:
    assert attempts(drained(shard=2)) == [1, 1], "slot 1 holds the other half of the only copy"
    assert attempts(drained(shard=2, replicas=4)) == [2, 1, 1, 1], "slots 2 and 3 hold another"


def test_a_member_on_a_lost_node_does_not_count_as_another_copy() -> None:
    lost = {"node-0": NodeFact(name="node-0"), "node-1": NodeFact(name="node-1", not_ready_for=5.0)}
    assert attempts(drained()) == [2, 1]
    assert attempts(drained(nodes=lost)) == [1, 1]
    assert attempts(drained(silent_nodes={"node-1": 20.0})) == [1, 1]


def test_a_pod_that_no_epoch_ever_held_leaves_at_once() -> None:
    status = JobStatus(slots=[a_slot(s) for s in range(3)])
    observed = an_observation(job=a_job(status=status), seen=levels.Seen())
    assert attempts(plan(with_verdict(observed, 1, NodeState.LEAVING), NOW)) == [1, 2, 1]


def test_an_operator_that_has_just_started_asks_a_pod_before_it_takes_it_for_untrained() -> None:
    """The first epoch began while no operator ran, so status does not know it."""
    status = JobStatus(slots=[a_slot(s) for s in range(3)])
    observed = an_observation(job=a_job(status=status), seen=None, callers=frozenset())
    judged = with_verdict(observed, 1, NodeState.LEAVING)
    assert attempts(plan(judged, NOW)) == [1, 1, 1]
    silent = dict.fromkeys((f"uid-{s}-1" for s in range(3)), 31.0)
    assert attempts(plan(replace(judged, asked_for=silent), NOW)) == [1, 2, 1]
    stopping = replace(observed, job=a_job(a_spec(suspend=True), status=status))
    first = plan(stopping, NOW)
    assert attempts(first) == [1, 1, 1]
    assert first.wanted is not None
    assert first.wanted.stop is levels.Stop.SUSPEND
    assert attempts(plan(replace(stopping, seen=levels.Seen()), NOW)) == [2, 2, 2]
    assert attempts(plan(replace(stopping, asked_for=silent), NOW)) == [2, 2, 2]


def test_a_node_without_heartbeats_whose_ranks_still_step_is_asked_to_leave() -> None:
    nodes = {
        f"node-{s}": NodeFact(name=f"node-{s}", not_ready_for=61.0 if s == 1 else None)
        for s in range(3)
    }
    planned = plan(an_observation(nodes=nodes), NOW)
    assert not planned.counts
    assert planned.wanted is not None
    assert planned.wanted.leave == (1,)
    planned = plan(an_observation(nodes=nodes, seen=a_seen(running=False)), NOW)
    assert attempts(planned) == [1, 2, 1]
    assert planned.status.slots[1].cause == "NodeLost"


def test_a_node_that_blinks_is_no_reason() -> None:
    nodes = {
        f"node-{s}": NodeFact(name=f"node-{s}", not_ready_for=20.0 if s == 1 else None)
        for s in range(3)
    }
    assert attempts(plan(an_observation(nodes=nodes, seen=a_seen(running=False)), NOW)) == [1, 1, 1]


def test_a_deleted_node_object_is_a_lost_node() -> None:
    observed = an_observation(
        nodes={"node-0": NodeFact(name="node-0"), "node-2": NodeFact(name="node-2")}
    )
    assert attempts(plan(observed, NOW)) == [1, 2, 1]


def test_a_pod_that_waits_is_made_anew_once_a_node_that_it_shuts_out_is_released() -> None:
    waiting = {
        "phase": "Pending",
        "node": "",
        "running_since": None,
        "scheduling": "0/4 nodes are available",
    }
    observed = with_pod(
        an_observation(seen=a_seen(running=False)), 1, avoids=frozenset({"node-5"}), **waiting
    )
    held = replace(observed, verdicts={"node-5": a_verdict("node-5", NodeState.LEAVING)})
    assert attempts(plan(held, NOW)) == [1, 1, 1]
    deleted = replace(observed, absent_nodes=frozenset({"node-5"}))
    assert attempts(plan(deleted, NOW)) == [1, 1, 1], "a new pod could not use it either"
    planned = plan(observed, NOW)
    assert attempts(planned) == [1, 2, 1]
    assert planned.status.restarts is not None
    assert planned.status.restarts.total == 0


def test_a_new_pod_prefers_not_to_go_where_there_is_a_suspicion() -> None:
    job = a_job(status=a_status(slots=[a_slot(0), a_slot(1), a_slot(2, 2, pod_uid=None)]))
    observed = an_observation(job=job, pods=(a_pod(0), a_pod(1)), seen=a_seen(running=False))
    planned = plan(with_verdict(observed, 1, NodeState.SUSPECT), NOW)
    (create,) = creations(planned)
    node = create.body["spec"]["affinity"]["nodeAffinity"]
    assert "requiredDuringSchedulingIgnoredDuringExecution" not in node
    assert len(node["preferredDuringSchedulingIgnoredDuringExecution"]) == 1


def test_no_pod_is_made_before_the_nodes_have_been_judged() -> None:
    missing = an_observation(pods=(a_pod(0), a_pod(1)), seen=a_seen(running=False))
    slots = [a_slot(0), a_slot(1), a_slot(2, 2, pod_uid=None)]
    observed = replace(missing, job=a_job(status=a_status(slots=slots)))
    unjudged = plan(replace(observed, judged=False), NOW)
    assert creations(unjudged) == []
    assert (
        "2 of 3 pods exist; the operator creates pods once it has judged the nodes"
        in condition(unjudged, "Running").message
    )
    judged = plan(observed, NOW)
    assert len(creations(judged)) == 1
    assert condition(judged, "Running").message == "2 of 3 pods exist"


@pytest.mark.parametrize(("cause", "shunned"), [("NodeGone", ["node-5"]), ("PodDeleted", [])])
def test_a_slot_that_left_a_node_shuns_it_though_nothing_is_said_against_it_yet(
    cause: str, shunned: list[str]
) -> None:
    """The operator that moved the slot died before it could mark the node."""
    left = a_slot(2, 2, pod_uid=None, cause=cause, former_node="node-5")
    job = a_job(status=a_status(slots=[a_slot(0), a_slot(1), left]))
    observed = an_observation(job=job, pods=(a_pod(0), a_pod(1)), seen=a_seen(running=False))
    (create,) = creations(plan(observed, NOW))
    affinity = create.body["spec"].get("affinity", {}).get("nodeAffinity", {})
    preferred = affinity.get("preferredDuringSchedulingIgnoredDuringExecution", [])
    fields = [f for term in preferred for f in term["preference"]["matchFields"]]
    assert [v for f in fields if f["operator"] == "NotIn" for v in f["values"]] == shunned


# --- a pod that is deleted or vanishes --------------------------------------------------------------------


def test_a_pod_that_somebody_deletes_may_save_until_its_grace_ends() -> None:
    observed = with_pod(an_observation(), 2, deleting_until=NOW + 30)
    planned = plan(observed, NOW)
    assert attempts(planned) == [1, 1, 1]
    assert planned.wanted is not None
    assert planned.wanted.leave == (2,)
    assert attempts(plan(observed, NOW + 31)) == [1, 1, 2]
    left = replace(observed, seen=a_seen(left=(a_left(2),)))
    assert attempts(plan(left, NOW)) == [1, 1, 2]


def test_a_pod_that_vanished_is_never_made_again_under_its_name() -> None:
    observed = an_observation(pods=(a_pod(0), a_pod(1)))
    planned = plan(observed, NOW)
    assert planned.counts
    assert attempts(planned) == [1, 1, 2]
    assert planned.status.slots[2].cause == "PodDeleted"


def test_a_status_that_was_lost_reuses_no_attempt() -> None:
    pods = (a_pod(0, 4), a_pod(1, 1), a_pod(2, 2))
    observed = an_observation(
        job=a_job(status=JobStatus()), pods=pods, seen=a_seen(((0, 4), (1, 3), (2, 2)))
    )
    assert attempts(plan(observed, NOW))[:1] == [4]
    assert attempts(plan(observed, NOW))[1] == 4, "attempt 3 has existed, though its pod is gone"


def test_an_eviction_is_the_pods_and_not_the_jobs_failure() -> None:
    planned = plan(
        with_pod(an_observation(), 0, phase="Failed", reason="Evicted", message="disk"), NOW
    )
    assert attempts(planned) == [2, 1, 1]
    assert planned.status.restarts is not None
    assert planned.status.restarts.by_cause == {"PodEvicted": 1}


def test_force_is_used_only_where_the_user_allows_it_and_the_node_is_lost() -> None:
    status = a_status(slots=[a_slot(0), a_slot(1, 2, pod_uid=None), a_slot(2)])
    pods = (a_pod(0), a_pod(1, deleting_until=NOW - 5), a_pod(2))
    nodes = {"node-0": NodeFact(name="node-0"), "node-2": NodeFact(name="node-2")}
    observed = an_observation(job=a_job(status=status), pods=pods, nodes=nodes)
    assert not [a for a in plan(observed, NOW).actions if isinstance(a, DeletePod)]
    allowed = a_job(a_spec(recovery={"forceDelete": True}), status=status)
    forced = [
        a for a in plan(replace(observed, job=allowed), NOW).actions if isinstance(a, DeletePod)
    ]
    assert [a.force for a in forced] == [True]


def test_a_slot_that_is_not_wanted_any_more_leaves_before_it_goes() -> None:
    observed = an_observation(job=a_job(a_spec(replicas=2), status=a_status()))
    planned = plan(observed, NOW)
    assert planned.wanted is not None
    assert (planned.wanted.leave, planned.wanted.want_workers) == ((2,), 2)
    gone = plan(replace(observed, seen=a_seen(left=(a_left(2),))), NOW)
    assert attempts(gone) == [1, 1, 2]
    assert gone.status.restarts is not None
    assert gone.status.restarts.total == 0


# --- the end ----------------------------------------------------------------------------------------------


def test_done_completes_the_job_and_nothing_after_it_fails_it() -> None:
    observed = an_observation(seen=a_seen(done=True, step=400))
    observed = with_pod(observed, 0, ended=an_end(Cause.USER_ERROR, "late"), phase="Succeeded")
    planned = plan(observed, NOW)
    assert condition(planned, "Complete").status == "True"
    assert condition(planned, "Failed").status == "False"
    assert planned.status.state == "Complete"


@pytest.mark.parametrize(
    "cause", [Cause.USER_ERROR, Cause.STORE, Cause.NOT_FINITE, Cause.RUN_EXISTS]
)
def test_an_end_for_good_fails_the_job_with_the_reports_words(cause: Cause) -> None:
    ended = an_end(cause, "ValueError: bad", rank=2, step=7)
    planned = plan(with_pod(an_observation(), 1, ended=ended, phase="Succeeded"), NOW)
    failed = condition(planned, "Failed")
    assert (failed.status, failed.reason) == ("True", cause.value)
    assert failed.message == "ValueError: bad (rank 2, step 7)"
    assert planned.actions == ()


def test_a_failure_that_the_job_tells_needs_no_report() -> None:
    failure = levels.Failure(cause="UserError", message="boom", rank=0, step=3)
    planned = plan(an_observation(seen=a_seen(failure=failure)), NOW)
    assert condition(planned, "Failed").message == "boom (rank 0, step 3)"


def test_a_run_that_another_job_took_over_ends_as_fenced() -> None:
    ended = an_end(Cause.FENCED, "job team/lm (uid 9…) writes this run")
    pods = tuple(a_pod(s, phase="Succeeded", ended=ended, running_since=None) for s in range(3))
    planned = plan(an_observation(pods=pods, seen=None), NOW)
    assert condition(planned, "Failed").reason == "Fenced"
    assert "uid 9" in condition(planned, "Failed").message


def test_a_pod_that_comes_back_with_its_node_fails_no_suspended_job() -> None:
    """It is fenced by the epochs that its own job has claimed without it."""
    ended = an_end(Cause.FENCED, "epoch 4 of the same job continues without slot 2")
    left = a_pod(2, 1, deleting_until=NOW - 5, running_since=None, ended=ended)
    status = a_status(slots=[SlotStatus(slot=s, attempt=2) for s in range(3)])
    job = a_job(a_spec(suspend=True), status=status)
    planned = plan(an_observation(job=job, pods=(left,), seen=None), NOW)
    assert condition(planned, "Failed").status != "True"


def test_the_first_fenced_pod_of_a_job_that_stands_waits_for_the_others() -> None:
    end = replace(an_end(Cause.FENCED, "job team/other took the run over"), finished_at=NOW)
    observed = an_observation(seen=a_seen(running=False))
    observed = with_pod(observed, 1, ended=end, phase="Succeeded", running_since=None)
    assert not plan(observed, NOW + 9).counts
    assert attempts(plan(observed, NOW + 11)) == [1, 2, 1]


def test_a_pod_that_stopped_for_a_suspension_that_was_taken_back_is_nobodys_failure() -> None:
    observed = an_observation(seen=a_seen(running=False))
    observed = with_pod(observed, 1, ended=an_end(Cause.STOPPED), phase="Succeeded")
    planned = plan(observed, NOW)
    assert attempts(planned) == [1, 2, 1]
    assert planned.status.restarts is not None
    assert planned.status.restarts.total == 0


@pytest.mark.parametrize(
    ("deleting_until", "cause", "said"),
    [
        (None, "PodLeft", "pod lm-1-1 has left; the checkpoint of step 40 is committed"),
        (
            NOW + 20,
            "PodDeleted",
            "pod lm-1-1 is being deleted, and has left; the checkpoint of step 40",
        ),
    ],
)
def test_a_pod_that_has_left_is_replaced_under_the_cause_of_its_leave(
    deleting_until: float | None, cause: str, said: str
) -> None:
    """The kubelet may report its end before the job's report of the leave is read."""
    ended = an_end(Cause.LEFT, "left; the checkpoint of step 40 is committed")
    gone = {"ended": ended, "phase": "Succeeded", "deleting_until": deleting_until}
    planned = plan(with_pod(an_observation(), 1, **gone), NOW)
    assert attempts(planned) == [1, 2, 1]
    assert planned.status.slots[1].cause == cause
    assert any(said in event.message for event in planned.events)


HAS_LEFT = {"ended": an_end(Cause.LEFT, "left; step 40 is committed"), "phase": "Succeeded"}


def test_a_pod_that_has_left_a_faulty_node_is_not_replaced_as_if_it_had_left_by_itself() -> None:
    asked = plan(with_verdict(an_observation(), 1, NodeState.LEAVING), NOW)
    ended = with_pod(an_observation(job=a_job(status=asked.status)), 1, **HAS_LEFT)
    by_verdict = plan(with_verdict(ended, 1, NodeState.LEAVING), NOW)
    assert by_verdict.status.slots[1].cause == "NodeLeaving"
    assert any("GPU 0 of node-1 has failed" in event.message for event in by_verdict.events)
    for judged in (True, False):
        later = plan(replace(ended, judged=judged), NOW)
        assert later.status.slots[1].cause == "NodeLeaving", "the verdict has just ended"


def test_a_pod_that_has_left_a_node_that_is_deleted_has_lost_its_node() -> None:
    observed = with_pod(an_observation(), 1, **HAS_LEFT)
    nodes = {name: node for name, node in observed.nodes.items() if name != "node-1"}
    assert plan(replace(observed, nodes=nodes), NOW).status.slots[1].cause == "NodeLost"


def test_a_pod_that_has_left_as_requested_and_is_wanted_again_is_nobodys_failure() -> None:
    left = replace(a_left(1), asked=True)
    planned = plan(with_pod(an_observation(seen=a_seen(left=(left,))), 1, **HAS_LEFT), NOW)
    assert planned.status.slots[1].cause == "LeaveWithdrawn"


def test_a_pod_that_left_because_its_node_shuts_down_says_so() -> None:
    words = {
        "reason": "Terminated",
        "message": "Pod was terminated in response to imminent node shutdown.",
    }
    planned = plan(with_pod(an_observation(), 1, **(HAS_LEFT | {"phase": "Failed"} | words)), NOW)
    assert planned.status.slots[1].cause == "PodLeft"
    assert any(
        "(Terminated: Pod was terminated in resp" in event.message for event in planned.events
    )


def test_one_fenced_pod_of_a_job_that_runs_is_replaced() -> None:
    observed = with_pod(an_observation(), 1, ended=an_end(Cause.FENCED), phase="Succeeded")
    assert attempts(plan(observed, NOW)) == [1, 2, 1]


def test_what_the_job_said_before_a_pod_was_fenced_does_not_show_that_it_runs_without_it() -> None:
    end = replace(an_end(Cause.FENCED), finished_at=NOW - 3)
    observed = with_pod(an_observation(), 1, ended=end, phase="Succeeded", running_since=None)
    assert not plan(replace(observed, seen_age=5.0), NOW).counts
    assert attempts(plan(replace(observed, seen_age=0.5), NOW)) == [1, 2, 1]


def test_a_deadline_is_a_deadline() -> None:
    observed = an_observation(job=a_job(a_spec(activeDeadlineSeconds=30), status=a_status()))
    assert condition(plan(observed, NOW), "Failed").reason == "DeadlineExceeded"


def test_time_spent_suspended_does_not_count_against_the_deadline() -> None:
    spec = a_spec(activeDeadlineSeconds=100, suspend=True)
    status = JobStatus(epoch=1, observed_generation=1, stopping_since=to_stamp(NOW - 50))
    asleep = an_observation(
        job=a_job(spec, status=status, created_at=NOW - 120), pods=(), seen=None
    )
    assert not conditions.is_true(plan(asleep, NOW).status, "Failed")
    awake_spec = a_spec(activeDeadlineSeconds=100)
    awake = replace(asleep, job=a_job(awake_spec, status=status, created_at=NOW - 120))
    resumed = plan(awake, NOW)
    assert (resumed.status.suspended_seconds, resumed.status.stopping_since) == (50, None)
    later = replace(awake, job=a_job(awake_spec, status=resumed.status, created_at=NOW - 120))
    assert not conditions.is_true(plan(later, NOW + 29).status, "Failed")
    assert condition(plan(later, NOW + 31), "Failed").reason == "DeadlineExceeded"


def test_a_job_that_was_made_suspended_has_not_been_active() -> None:
    spec = a_spec(activeDeadlineSeconds=100, suspend=True)
    born = an_observation(job=a_job(spec, created_at=NOW - 500), pods=(), seen=None)
    planned = plan(replace(born, job=replace(born.job, status=JobStatus())), NOW)
    job = a_job(a_spec(activeDeadlineSeconds=100), status=planned.status, created_at=NOW - 500)
    assert plan(replace(born, job=job), NOW + 10).status.suspended_seconds == 510


def test_a_job_that_is_suspended_because_its_template_is_invalid_was_active_before() -> None:
    spec, status = a_spec(activeDeadlineSeconds=1000, suspend=True), JobStatus(state="Pending")
    job = a_job(spec, status=status, created_at=NOW - 500)
    planned = plan(an_observation(job=job, pods=(), seen=None), NOW)
    assert planned.status.stopping_since == to_stamp(NOW)
    late = replace(job, created_at=NOW - 1001)
    planned = plan(an_observation(job=late, pods=(), seen=None), NOW)
    assert condition(planned, "Failed").reason == "DeadlineExceeded"


def test_pods_stay_for_their_logs_and_the_living_get_the_drain_time() -> None:
    def finished(age: float) -> Observed:
        status = a_status(conditions=[a_condition("Failed", "UserError", age)])
        observed = an_observation(job=a_job(status=status))
        return with_pod(observed, 0, phase="Succeeded", running_since=None)

    early, late = plan(finished(10), NOW), plan(finished(121), NOW)
    assert early.actions == ()
    assert early.wanted is not None
    assert early.wanted.stop is levels.Stop.FINISH
    assert [a.name for a in late.actions if isinstance(a, DeletePod)] == ["lm-1-1", "lm-2-1"]


def test_a_container_that_only_crashes_does_not_go_on_crashing_after_the_end() -> None:
    status = a_status(conditions=[a_condition("Failed", "AgentNeverCalled")])
    observed = an_observation(job=a_job(status=status), pods=(a_pod(0), a_pod(1)))
    observed = with_pod(observed, 1, running_since=None, waiting="CrashLoopBackOff")
    assert [a.name for a in plan(observed, NOW).actions if isinstance(a, DeletePod)] == ["lm-1-1"]


def test_a_finished_job_goes_after_its_time() -> None:
    status = a_status(conditions=[a_condition("Complete", "Done", 61)])
    observed = an_observation(job=a_job(a_spec(ttlSecondsAfterFinished=60), status=status), pods=())
    assert [type(a) for a in plan(observed, NOW).actions] == [DeleteJob]
    assert plan(observed, NOW - 11).wake_after == pytest.approx(10)


# --- agents that never call -------------------------------------------------------------------------------


def never_called(**pod: Any) -> Observed:
    status = JobStatus(slots=[a_slot(s) for s in range(3)])
    observed = an_observation(job=a_job(status=status), seen=None, callers=frozenset())
    return with_pod(observed, 0, **pod)


def test_a_container_whose_agent_never_calls_fails_the_job_and_says_what_to_write() -> None:
    asked = {f"uid-{s}-1": 601.0 for s in range(3)}
    observed = replace(never_called(running_since=NOW - 700), asked_for=asked)
    failed = condition(plan(observed, NOW), "Failed")
    assert failed.reason == "AgentNeverCalled"
    assert "command: [everstep, run, train.py]" in failed.message
    not_asked_long = replace(observed, asked_for={**asked, "uid-0-1": 20.0})
    assert condition(plan(not_asked_long, NOW), "Failed").status == "False", (
        "this operator has asked for 20 s only"
    )


def test_an_image_without_everstep_fails_once_nobody_else_can_have_called() -> None:
    ended = an_end(code=127, message='exec: "everstep": executable file not found in $PATH')
    observed = never_called(
        running_since=None, waiting="CrashLoopBackOff", last_ended=ended, restarts=1
    )
    assert condition(plan(observed, NOW), "Failed").status == "False", "the others may still call"
    silent = replace(observed, asked_for={f"uid-{s}-1": 31.0 for s in range(1, 3)})
    alone = replace(observed, pods=observed.pods[:1])
    for nobody_else in (silent, alone):
        failed = condition(plan(nobody_else, NOW), "Failed")
        assert failed.reason == "AgentNeverCalled"
        assert "executable file not found" in failed.message


def test_one_node_that_cannot_start_a_container_fails_no_job_that_still_starts() -> None:
    error = an_end(code=128, message='exec: "everstep": executable file not found in $PATH')
    observed = never_called(running_since=None, waiting="RunContainerError", last_ended=error)
    for slot in (1, 2):
        observed = with_pod(observed, slot, running_since=None, waiting="ContainerCreating")
    assert condition(plan(observed, NOW), "Failed").status == "False"
    late = replace(observed, starting_for={f"uid-{s}-1": 601.0 for s in range(3)})
    assert condition(plan(late, NOW), "Failed").reason == "AgentNeverCalled"


def test_a_node_whose_driver_is_broken_fails_no_job_of_one_pod() -> None:
    """The slot's next pod excludes that node."""
    error = an_end(code=128, message="nvidia-container-cli: nvml error: version mismatch")
    observed = never_called(
        running_since=None, waiting="CrashLoopBackOff", last_ended=error, restarts=5
    )
    alone = replace(observed, job=a_job(a_spec(replicas=1)), pods=observed.pods[:1])
    planned = plan(alone, NOW)
    assert condition(planned, "Failed").status == "False"
    assert attempts(planned) == [1]
    late = plan(replace(alone, starting_for={"uid-0-1": 601.0}), NOW)
    assert condition(late, "Failed").status == "False"
    assert attempts(late) == [2]
    assert [f.node for f in late.status.slots[0].start_failures] == ["node-0"]


def test_a_command_that_is_missing_is_not_the_nodes_fault_whatever_its_path() -> None:
    words = "runc create failed: unable to start container process: exec: "
    words += '"/opt/nvidia/entry.sh": no such file'
    observed = never_called(running_since=None, last_ended=an_end(code=128, message=words))
    alone = replace(observed, job=a_job(a_spec(replicas=1)), pods=observed.pods[:1])
    assert condition(plan(alone, NOW), "Failed").reason == "AgentNeverCalled"


def test_silence_of_a_job_that_has_run_before_fails_nothing() -> None:
    observed = replace(
        an_observation(seen=None, callers=frozenset()), asked_for={"uid-0-1": 9999.0}
    )
    planned = plan(observed, NOW)
    assert condition(planned, "Failed").status == "False"
    assert planned.actions == ()


# --- suspend ----------------------------------------------------------------------------------------------


def suspended(**changes: Any) -> Observed:
    return an_observation(job=a_job(a_spec(suspend=True), status=a_status()), **changes)


def test_suspend_asks_for_a_save_first() -> None:
    planned = plan(suspended(), NOW)
    assert planned.actions == ()
    assert planned.wanted is not None
    assert planned.wanted.stop is levels.Stop.SUSPEND
    assert planned.status.state == "Suspending"


def test_suspend_ends_the_pods_after_the_save_and_resume_uses_new_attempts() -> None:
    observed = suspended(seen=a_seen(running=False, stopped=levels.Stopped(epoch=1, step=42)))
    counted = plan(observed, NOW)
    assert counted.counts
    assert attempts(counted) == [2, 2, 2]
    second = replace(observed, job=replace(observed.job, status=counted.status))
    assert len([a for a in plan(second, NOW).actions if isinstance(a, DeletePod)]) == 3
    empty = replace(second, pods=(), seen=None)
    done = plan(empty, NOW)
    assert condition(done, "Suspended").status == "True"
    assert done.actions == ()
    resumed = replace(empty, job=a_job(status=done.status, generation=2))
    names = [
        a.body["metadata"]["name"] for a in plan(resumed, NOW).actions if isinstance(a, CreatePod)
    ]
    assert names == ["lm-0-2", "lm-1-2", "lm-2-2"]
    assert plan(resumed, NOW).status.restarts == counted.status.restarts


def test_a_suspension_is_told_once_and_makes_no_pods_in_its_events() -> None:
    observed = suspended(seen=a_seen(running=False, stopped=levels.Stopped(epoch=1, step=42)))
    counted = plan(observed, NOW)
    assert [e.reason for e in counted.events if e.reason != "CheckpointCommitted"] == ["Suspending"]
    job = replace(observed.job, status=counted.status)
    over = plan(replace(observed, job=job, pods=(), seen=None), NOW + 2)
    assert [e.reason for e in over.events] == ["Suspended"]


def test_suspend_does_not_wait_for_ever() -> None:
    observed = suspended()
    status = observed.job.status.model_copy(update={"stopping_since": to_stamp(NOW - 121)})
    late = replace(observed, job=replace(observed.job, status=status))
    assert plan(late, NOW).counts
    assert not plan(replace(late, stopping_for=3.0), NOW).counts, "by this process's own clock"


def test_a_pod_that_stays_on_a_lost_node_does_not_keep_the_job_suspending() -> None:
    """No kubelet is left to end the pod, and its attempt is over."""
    slots = [a_slot(s, 2, pod_uid=None, node=None) for s in range(3)]
    observed = suspended(pods=(a_pod(1, deleting_until=NOW - 5),), seen=None)
    job = replace(observed.job, status=a_status(slots=slots))
    waits = replace(observed, job=job)
    assert plan(waits, NOW).status.state == "Suspending", "its kubelet is still ending it"
    away = NodeFact(name="node-1", not_ready_for=100.0, why="no heartbeat")
    lost = plan(replace(waits, nodes={"node-1": away}), NOW)
    assert condition(lost, "Suspended").status == "True"
    assert "lm-1-1" in condition(lost, "Suspended").message
    in_grace = (a_pod(1, deleting_until=NOW + 5),)
    early = replace(waits, nodes={"node-1": away}, pods=in_grace)
    assert plan(early, NOW).status.state == "Suspending"


def test_an_ended_pod_that_another_controllers_finalizer_keeps_does_not_keep_the_job_suspending() -> (
    None
):
    slots = [a_slot(s, 2, pod_uid=None, node=None) for s in range(3)]
    kept = a_pod(1, deleting_until=NOW + 5, phase="Succeeded", running_since=None)
    observed = suspended(pods=(kept,), seen=None)
    planned = plan(replace(observed, job=replace(observed.job, status=a_status(slots=slots))), NOW)
    assert condition(planned, "Suspended").status == "True"
    assert "lost node" not in condition(planned, "Suspended").message, "nothing of it runs"


def test_a_spec_that_cannot_be_read_stops_nothing() -> None:
    observed = an_observation()
    job = replace(observed.job, spec=None, spec_error="spec.workers.replicas: …")
    planned = plan(replace(observed, job=job), NOW)
    assert planned.actions == ()
    assert condition(planned, "Running").reason == "SpecInvalid"


def test_a_job_that_is_being_deleted_is_left_to_the_garbage_collector() -> None:
    observed = an_observation()
    planned = plan(replace(observed, job=replace(observed.job, deleting=True)), NOW)
    assert (planned.actions, planned.wanted) == ((), None)


def test_a_new_operator_that_nobody_has_answered_yet_finds_nothing_to_write() -> None:
    trained = plan(an_observation(), NOW)
    observed = an_observation()
    job = replace(observed.job, status=trained.status)
    planned = plan(replace(observed, job=job, seen=None, callers=frozenset()), NOW + 5)
    assert planned.status.world == trained.status.world
    assert planned.status.conditions == trained.status.conditions
    document = statuspatch.to_document(trained.status)
    assert statuspatch.decide_patch(document, planned.status, NOW + 5, 0.0) == {}

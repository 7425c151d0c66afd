"""Spares: which slots have a pod, how the loss of a spare counts, and where a spare is placed."""

from dataclasses import replace

import pytest

from everstep_contract import levels, names
from everstep_contract.levels import Phase, RuntimeIncident
from everstep_operator import model
from everstep_operator.jobs.actions import CreatePod, DeletePod
from everstep_operator.jobs.observed import Refusal
from everstep_operator.jobs.plan import plan
from everstep_operator.jobs.slots import choose_slots
from everstep_operator.jobs.stamps import to_stamp
from everstep_operator.jobs.statuspatch import decide_patch, to_document
from everstep_operator.model_status import SlotStatus
from everstep_operator.values import NodeState
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

ALL = ((0, 1), (1, 1), (2, 1))


def spec_with(spares, replicas=3, **changes):
    workers = {"replicas": replicas, "spares": spares, "template": TEMPLATE, **changes}
    return a_spec(workers=workers)


def spare(slot, attempt=1):
    return levels.SlotAttempt(slot=slot, attempt=attempt)


def with_spare(members=ALL, *, spares=1, replicas=3, pods=(0, 1, 2, 3), ready=(3,), **changes):
    """Three slots train, and slot 3 is a ready spare."""
    told = tuple(spare(s) for s in ready)
    status = a_status(4)
    seen = a_seen(members, spares=told)
    observed = an_observation(
        job=a_job(spec_with(spares, replicas), status=status),
        pods=tuple(a_pod(s) for s in pods),
        seen=seen,
        callers=frozenset(f"uid-{s}-1" for s in range(5)),
    )
    return replace(observed, **changes)


def created(planned):
    return [a for a in planned.actions if isinstance(a, CreatePod)]


def recovered(planned):
    return [e.incident for e in planned.events if e.reason == "Recovered"]


def raised(observed, planned):
    """Slot → its new attempt."""
    before = {r.slot: r.attempt for r in observed.job.status.slots}
    return {r.slot: r.attempt for r in planned.status.slots if r.attempt > before.get(r.slot, 0)}


# --- which slots ---------------------------------------------------------------------------------


def chosen(known, members, holding, *, replicas=3, spares=1):
    found = choose_slots(known, members, holding, replicas=replicas, spares=spares)
    return sorted(found.training), sorted(found.spares)


def test_a_new_job_trains_in_its_first_slots():
    assert chosen([], [], []) == ([0, 1, 2], [3])


def test_a_spare_that_has_taken_a_place_trains_on_and_the_lost_slot_becomes_the_spare():
    assert chosen(range(4), [0, 2, 3], [0, 1, 2, 3]) == ([0, 2, 3], [1])
    assert chosen(range(4), [0, 2, 3], [0, 2, 3]) == ([0, 2, 3], [1])


def test_a_spare_that_is_about_to_join_is_kept_rather_than_the_lost_slot():
    assert chosen(range(4), [0, 2], [3, 0, 2, 1], spares=0) == ([0, 2, 3], [])


def test_a_job_that_shrinks_keeps_its_spare_and_lets_its_last_member_go():
    assert chosen(range(5), [0, 1, 2, 3], [0, 1, 2, 3, 4]) == ([0, 1, 2], [4])
    assert chosen(range(4), [0, 1, 2, 3], [0, 1, 2, 3]) == ([0, 1, 2], [4])


def test_a_slot_that_was_given_up_comes_back_before_a_new_one():
    assert chosen(range(5), [0, 1, 2], [0, 1, 2]) == ([0, 1, 2], [3])


# --- one pass ------------------------------------------------------------------------------------


def test_a_job_with_spares_creates_them_after_the_pods_that_train():
    fresh = an_observation(job=a_job(spec_with(2)), pods=(), seen=None)
    made = created(plan(fresh, NOW))
    assert [(a.slot, a.spare) for a in made] == [
        (0, False), (1, False), (2, False), (3, True), (4, True),
    ]  # fmt: skip


def test_the_job_is_told_how_many_train_and_the_spare_is_a_peer():
    wanted = plan(with_spare(), NOW).wanted
    assert wanted is not None
    assert (wanted.min_workers, wanted.want_workers) == (3, 3)
    assert [p.slot for p in wanted.peers] == [0, 1, 2, 3]
    assert wanted.leave == ()


def test_status_tells_the_ready_spares():
    status = plan(with_spare(), NOW).status
    assert status.spares is not None
    assert (status.spares.ready, status.spares.desired, status.spares.slots) == (1, 1, [3])
    assert status.world is not None
    assert status.world.summary == "3/3"
    assert plan(an_observation(), NOW).status.spares is None


def test_a_pod_that_waits_and_is_no_longer_wanted_is_given_back_without_an_incident():
    """Because of a suspicion the job has a spare. The lost slot's next pod has come, and neither trains yet."""
    slots = [a_slot(0), a_slot(1, 2), a_slot(2), a_slot(3)]
    observed = an_observation(
        job=a_job(spec_with(0), status=a_status(slots=slots)),
        pods=(a_pod(0), a_pod(1, 2), a_pod(2), a_pod(3)),
        seen=a_seen(((0, 1), (2, 1))),
    )
    asked = plan(observed, NOW)
    assert [s.slot for s in asked.status.slots if s.leaving_since] == [3]
    left = replace(
        observed,
        job=replace(observed.job, status=asked.status),
        seen=a_seen(((0, 1), (2, 1)), left=(a_left(3),)),
    )
    given_back = plan(left, NOW + 1)
    assert {s.slot: s.attempt for s in given_back.status.slots}[3] == 2
    assert asked.status.incidents == given_back.status.incidents == []
    assert not [e for e in (*asked.events, *given_back.events) if "slot 3" in e.message]


def test_the_seconds_for_which_spares_hold_a_node_are_added_up():
    def spent(observed, written=NOW - 30, known=100):
        job = observed.job
        status = job.status.model_copy(
            update={"observed_at": to_stamp(written), "spare_seconds": known}
        )
        return plan(replace(observed, job=replace(job, status=status)), NOW).status.spare_seconds

    assert spent(with_spare()) == 130
    two = with_spare(spares=2, pods=(0, 1, 2, 3, 4))
    two = replace(two, job=replace(two.job, status=a_status(5)))
    assert spent(two) == 160
    assert spent(two, known=None) == 60
    assert spent(with_spare(), written=NOW + 5) == 100, "the clock was set back"
    waits = replace(two, pods=(*two.pods[:4], a_pod(4, node="", scheduling="0/3 nodes fit")))
    assert spent(waits) == 130, "a spare without a node costs nothing"
    slots = [r if r.slot < 4 else SlotStatus(slot=4, attempt=1) for r in two.job.status.slots]
    placed = replace(two, job=replace(two.job, status=a_status(slots=slots)))
    assert spent(placed) == 130, "it has got its node since status was written"
    over = replace(two, pods=(*two.pods[:4], a_pod(4, phase="Failed")))
    assert spent(over) == 130
    assert spent(an_observation(), known=None) is None


def test_the_seconds_of_spares_alone_bring_no_write_about():
    status = with_spare().job.status
    old = to_document(status.model_copy(update={"observed_at": to_stamp(NOW - 60)}))
    later = status.model_copy(update={"spare_seconds": 60})
    assert decide_patch(old, later, NOW, 1.0) == {}
    stepped = later.model_copy(update={"step": 41})
    assert decide_patch(old, stepped, NOW, 1.0)["spareSeconds"] == 60


def test_a_spare_that_has_no_node_keeps_the_job_running_and_says_why():
    waits = a_pod(3, node="", running_since=None, phase="Pending", scheduling="0/3 nodes fit")
    pods = (*(a_pod(s) for s in range(3)), waits)
    status = plan(replace(with_spare(ready=()), pods=pods), NOW).status
    assert status.state == "Running"
    assert status.spares is not None
    assert (status.spares.ready, status.spares.message) == (0, "pod lm-3-1: 0/3 nodes fit")


def test_the_loss_of_a_spare_interrupts_nothing_and_it_is_replaced():
    verdict = {"node-3": a_verdict("node-3", NodeState.GONE)}
    observed = with_spare(verdicts=verdict)
    planned = plan(observed, NOW)
    assert raised(observed, planned) == {3: 2}
    assert planned.status.state == "Running"
    assert planned.status.incidents == []
    assert planned.status.restarts is not None
    assert planned.status.restarts.total == 0


def test_a_spare_on_a_bad_node_leaves_it_at_once_without_an_incident():
    verdict = {"node-3": a_verdict("node-3", NodeState.LEAVING)}
    observed = with_spare(verdicts=verdict)
    planned = plan(observed, NOW)
    assert planned.wanted is not None
    assert planned.wanted.leave == (3,)
    assert (planned.status.state, planned.status.incidents) == ("Running", [])
    assert next(r for r in planned.status.slots if r.slot == 3).incident is None


def test_a_member_that_is_lost_after_a_spare_took_its_place_is_counted_once():
    """The job has recovered before the operator learns of the node's fault."""
    lost = levels.RuntimeIncident(
        id="lm-1",
        cause="AgentLost",
        message="slot 1",
        slot=1,
        slots=(1,),
        rung="regroup",
        phases=(Phase(name="first_step", ms=130),),
        open=False,
    )
    seen = a_seen(((0, 1), (2, 1), (3, 1)), incidents=(lost,))
    told = plan(with_spare(seen=seen), NOW)
    assert [i.cause for i in told.status.incidents] == ["AgentLost"]
    assert recovered(told) == ["lm-1"]
    verdict = {"node-1": a_verdict("node-1", NodeState.GONE)}
    job = a_job(spec_with(1), status=told.status)
    observed = with_spare(job=job, seen=seen, verdicts=verdict)
    planned = plan(observed, NOW + 5)
    assert raised(observed, planned) == {1: 2}
    assert planned.status.restarts is not None
    assert planned.status.restarts.by_cause == {"NodeGone": 1}
    (incident,) = planned.status.incidents
    assert (incident.cause, incident.rung) == ("NodeGone", "regroup")
    following = replace(observed, job=a_job(spec_with(1), status=planned.status), verdicts={})
    after = plan(following, NOW + 6)
    assert [(a.slot, a.attempt, a.spare) for a in created(after)] == [(1, 2, True)]
    assert not any(i.open for i in after.status.incidents), (
        "the job has its full size without slot 1"
    )
    assert recovered(planned) + recovered(after) == [], "the recovery was reported already"
    assert next(r for r in after.status.slots if r.slot == 1).incident is None


def test_an_incident_of_a_lost_member_ends_once_the_spare_trains():
    verdict = {"node-1": a_verdict("node-1", NodeState.GONE)}
    first = with_spare(verdicts=verdict)
    counted = plan(first, NOW).status
    assert [i.open for i in counted.incidents] == [True]
    job = a_job(spec_with(1), status=counted)
    short = replace(first, job=job, seen=a_seen(((0, 1), (2, 1))))
    waits = plan(short, NOW + 1).status
    assert [i.open for i in waits.incidents] == [True]
    job = a_job(spec_with(1), status=waits)
    whole = replace(first, job=job, seen=a_seen(((0, 1), (2, 1), (3, 1))), verdicts={})
    assert [i.open for i in plan(whole, NOW + 2).status.incidents] == [False]


def test_scaling_down_keeps_the_spare_and_asks_the_last_member_to_leave():
    observed = with_spare(replicas=2)
    planned = plan(observed, NOW)
    assert planned.wanted is not None
    assert (planned.wanted.want_workers, planned.wanted.leave) == (2, (2,))
    left = replace(observed, seen=a_seen(ALL[:2], left=(a_left(2),), spares=(spare(3),)))
    after = plan(left, NOW)
    assert raised(left, after) == {2: 2}
    settled = replace(left, job=a_job(spec_with(1, 2), status=after.status))
    last = plan(settled, NOW)
    assert created(last) == []
    assert [a.slot for a in last.actions if isinstance(a, DeletePod)] == [2]


def test_spares_that_are_no_longer_wanted_go_and_members_stay():
    observed = with_spare(((0, 1), (2, 1), (3, 1)), spares=0, ready=(1,))
    planned = plan(observed, NOW)
    assert planned.wanted is not None
    assert planned.wanted.leave == (1,)
    assert planned.status.incidents == []


def test_a_pod_that_is_deleted_while_nobody_answers_does_not_change_the_plan_in_each_pass():
    """An operator that has just started cannot tell yet which pod is the spare to give up."""
    starts = a_pod(2, phase="Pending", running_since=None)
    pods = (a_pod(0), a_pod(1, deleting_until=NOW + 30), starts, a_pod(3))
    observed = replace(with_spare(replicas=2), pods=pods, seen=None, callers=frozenset())
    asked = []
    for _ in range(4):
        planned = plan(observed, NOW)
        observed = replace(observed, job=replace(observed.job, status=planned.status))
        asked.append(planned.wanted.leave)
    assert len(set(asked)) == 1, asked


def test_a_spare_that_a_quota_refuses_holds_no_other_pod_back():
    refusal = Refusal(invalid=False, message="exceeded quota", generation=1, at=NOW - 5)
    observed = with_spare(((0, 1), (2, 1)), pods=(0, 2), spare_refusal=refusal, ready=())
    status = a_status(
        4, slots=[a_slot(0), a_slot(1, 2, pod_uid=None), a_slot(2), a_slot(3, 2, pod_uid=None)]
    )
    planned = plan(replace(observed, job=a_job(spec_with(1), status=status)), NOW)
    assert [a.slot for a in created(planned)] == [1]
    assert planned.status.spares is not None
    assert planned.status.spares.message == "exceeded quota"


def test_a_spare_that_is_given_back_leaves_and_is_not_made_again():
    observed = with_spare(lent=frozenset({3}))
    planned = plan(observed, NOW)
    assert planned.wanted is not None
    assert planned.wanted.leave == (3,)
    assert "of another job" in planned.wanted.leave_reason
    assert planned.status.state == "Running"
    left = replace(observed, seen=a_seen(ALL, left=(a_left(3),)))
    raises = plan(left, NOW)
    assert raised(left, raises) == {3: 2}
    gone = replace(left, job=a_job(spec_with(1), status=raises.status), pods=observed.pods[:3])
    assert created(plan(gone, NOW)) == []
    back = replace(gone, lent=frozenset())
    assert [a.slot for a in created(plan(back, NOW))] == [3]


def test_a_spare_that_has_begun_to_train_is_not_given_back():
    observed = with_spare(((0, 1), (2, 1), (3, 1)), lent=frozenset({3}), ready=())
    wanted = plan(observed, NOW).wanted
    assert wanted is not None
    assert 3 not in wanted.leave


# --- a suspect node ------------------------------------------------------------------------------


def suspected(state=NodeState.SUSPECT, evidence=("gpu-1",), over_budget=False, **changes):
    verdict = a_verdict("node-1", state, evidence=evidence, over_budget=over_budget)
    return an_observation(**({"verdicts": {"node-1": verdict}} | changes))


def with_early_spare(**changes):
    """Slot 3 is ready, because the node of slot 1 was suspect."""
    job = a_job(status=a_status(4))
    pods = tuple(a_pod(s) for s in range(4))
    given = {"seen": a_seen(ALL, spares=(spare(3),)), "job": job, "pods": pods}
    return suspected(**(given | changes))


def asked(observed):
    wanted = plan(observed, NOW).wanted
    return None if wanted is None else wanted.leave


def test_a_job_without_spares_gets_one_while_a_node_of_a_member_is_suspect():
    planned = plan(suspected(), NOW)
    assert [(a.slot, a.spare) for a in created(planned)] == [(3, True)]
    assert planned.status.spares is not None
    assert (planned.status.spares.desired, planned.status.state) == (1, "Running")
    ready = plan(with_early_spare(), NOW)
    assert (created(ready), asked(with_early_spare())) == ([], ())
    assert ready.status.spares is not None
    assert "suspect" in (ready.status.spares.message or "")


def test_a_death_alone_is_no_evidence():
    assert created(plan(suspected(evidence=()), NOW)) == []


def test_a_node_beyond_the_cordon_budget_gets_no_spare():
    """A bad driver convicts all nodes, and no job leaves its own."""
    assert created(plan(suspected(over_budget=True), NOW)) == []
    assert asked(with_early_spare(over_budget=True)) == (3,), "nor does the spare stay"


def test_it_goes_when_the_suspicion_ends():
    assert asked(with_early_spare(verdicts={})) == (3,)


def test_it_stays_until_an_operator_that_takes_over_has_judged_the_nodes():
    unjudged = with_early_spare(verdicts={}, judged=False)
    assert asked(unjudged) == ()
    took_a_place = replace(unjudged, seen=a_seen(((1, 1), (2, 1), (3, 1)), spares=(spare(0),)))
    assert asked(took_a_place) == (), "slot 0 is the spare now"


def test_it_stays_while_the_job_recovers():
    held = a_seen((), running=False)
    assert 3 not in (asked(with_early_spare(seen=held)) or ())


def test_it_takes_the_place_of_the_member_whose_node_breaks():
    broken = with_early_spare(state=NodeState.GONE)
    planned = plan(broken, NOW)
    assert raised(broken, planned) == {1: 2}
    for members in (((0, 1), (2, 1)), ((0, 1), (2, 1), (3, 1))):
        job = a_job(status=planned.status)
        following = plan(replace(broken, job=job, seen=a_seen(members)), NOW + 1)
        assert created(following) == [], "slot 3 is a member or will be one"
        assert following.wanted is not None
        assert following.wanted.leave == ()
    assert planned.status.restarts is not None
    assert planned.status.restarts.by_cause == {"NodeGone": 1}


def starting_spare(state, **changes):
    """The spare's container does not run yet when the member's rank dies, and all ranks restart."""
    pods = (*(a_pod(s) for s in range(3)), a_pod(3, phase="Pending", running_since=None))
    return with_early_spare(
        **{"state": state, "pods": pods, "seen": a_seen((), running=False)} | changes
    )


def test_it_stays_while_it_starts_if_the_suspect_nodes_rank_dies():
    observed = starting_spare(NodeState.SUSPECT)
    planned = plan(observed, NOW)
    assert raised(observed, planned) == {}
    assert planned.wanted is not None
    assert planned.wanted.leave == ()


def test_a_member_whose_place_a_starting_spare_takes_goes_because_of_its_node():
    broken = starting_spare(NodeState.GONE)
    planned = plan(broken, NOW)
    assert raised(broken, planned) == {1: 2}
    assert planned.status.restarts is not None
    assert planned.status.restarts.by_cause == {"NodeGone": 1}
    following = plan(replace(broken, job=a_job(status=planned.status)), NOW + 1)
    assert created(following) == [], "slot 3 has taken its place"


def test_a_member_on_a_bad_node_that_the_user_takes_away_is_scaled_down():
    verdicts = {"node-3": a_verdict("node-3", NodeState.LEAVING)}
    members = a_seen(((0, 1), (1, 1), (2, 1), (3, 1)))
    observed = with_early_spare(verdicts=verdicts, seen=members)
    wanted = plan(observed, NOW).wanted
    assert wanted is not None
    assert wanted.leave == (3,)
    assert "replicas is 3" in wanted.leave_reason


def test_it_stays_until_the_member_has_left():
    leaving = with_early_spare(state=NodeState.LEAVING)
    assert asked(leaving) == (1,)
    left = replace(leaving, seen=a_seen(((0, 1), (2, 1)), left=(a_left(1),)))
    raises = plan(left, NOW)
    assert raised(left, raises) == {1: 2}
    after = plan(replace(left, job=a_job(status=raises.status)), NOW)
    assert created(after) == []
    assert after.wanted is not None
    assert after.wanted.leave == ()


def test_a_verdict_without_a_suspicion_before_creates_no_other_pod():
    assert created(plan(suspected(NodeState.LEAVING), NOW)) == []


def test_a_job_with_spares_gets_no_other_and_one_that_does_not_run_none():
    doubt = {"node-1": a_verdict("node-1", NodeState.SUSPECT, evidence=("gpu-1",))}
    assert created(plan(with_spare(verdicts=doubt), NOW)) == []
    assert created(plan(suspected(seen=a_seen(ALL, running=False)), NOW)) == []


# --- its pod -------------------------------------------------------------------------------------


def test_a_spare_prefers_a_rack_and_a_node_without_a_pod_of_the_job():
    fresh = an_observation(job=a_job(spec_with(1)), pods=(), seen=None)
    made = {a.slot: a.body["spec"].get("affinity") for a in created(plan(fresh, NOW))}
    assert made[0] is None
    terms = made[3]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    domains = [t["podAffinityTerm"]["topologyKey"] for t in terms]
    assert domains == [names.NODE_RACK, "kubernetes.io/hostname"]
    selectors = {str(t["podAffinityTerm"]["labelSelector"]) for t in terms}
    assert len(selectors) == 1
    assert fresh.job.uid in selectors.pop()


def test_more_slots_than_a_status_can_hold_are_refused():
    assert "spares" in refusal(replicas=4096, spares=1)
    assert "spares" in refusal(replicas=1, spares=65)
    assert refusal(replicas=4032, spares=64) == ""


def refusal(**workers):
    try:
        model.parse_spec(a_spec(workers={"template": TEMPLATE, **workers}))
    except model.SpecError as error:
        return str(error)
    return ""


def test_a_loss_that_a_spare_has_mended_before_it_is_heard_of_bears_the_verdict_on_the_node():
    lost = RuntimeIncident(
        id="lm-1", cause="Gone", message="slot 1 was declared gone", slot=1, open=False,
        rung="regroup", phases=(Phase(name="detect", ms=30),),
    )  # fmt: skip
    observed = with_spare(((0, 1), (2, 1), (3, 1)), ready=())
    observed = replace(
        observed,
        seen=replace(observed.seen, incidents=(lost,)),
        verdicts={"node-1": a_verdict("node-1", NodeState.GONE)},
    )
    (incident,) = plan(observed, NOW).status.incidents
    assert (incident.cause, incident.quarantine) == ("Gone", "inc-1")


def a_mended_loss(**changes):
    lost = RuntimeIncident(
        id="lm-1", cause="AgentLost", message="slot 1 is gone", slot=1, open=False,
        rung="regroup", steps_lost=0, phases=(Phase(name="first_step", ms=130),),
    )  # fmt: skip
    return replace(lost, **changes)


def given_up(**changes):
    """A job without spares. Slot 3, created because node-1 was suspect, took the place of slot 1, and slot 1
    was given up before the verdict on its node.
    """
    seen = a_seen(((0, 1), (2, 1), (3, 1)), incidents=(a_mended_loss(**changes),))
    observed = with_spare(seen=seen, spares=0, ready=())
    told = replace(observed, job=a_job(status=plan(observed, NOW).status))
    asked = replace(told, job=a_job(status=plan(told, NOW).status))
    gone = replace(asked, seen=replace(seen, left=(a_left(1),)))
    raises = plan(gone, NOW + 1)
    assert raised(gone, raises) == {1: 2}
    return replace(gone, job=a_job(status=raises.status), pods=(a_pod(0), a_pod(2), a_pod(3)))


def judged_later(observed, after, node="node-1", state=NodeState.GONE):
    """The incidents and their quarantines once the verdict on the node has come."""
    verdicts = {node: a_verdict(node, state, marks={"verdict": NOW + after})}
    status = plan(replace(observed, verdicts=verdicts), NOW + after).status
    return [(i.id, i.quarantine) for i in status.incidents]


def test_a_mended_loss_whose_slot_was_given_up_bears_the_verdict_that_comes_on_its_node():
    assert judged_later(given_up(), 20) == [("lm-1", "inc-1")]
    assert judged_later(given_up(), 20, state=NodeState.LEAVING) == [("lm-1", "inc-1")]
    next_pod = a_pod(1, 2, node="node-4", running_since=NOW + 10)
    started = replace(given_up(), pods=(*(a_pod(s) for s in (0, 2, 3)), next_pod))
    assert judged_later(started, 20) == [("lm-1", "inc-1")]


def test_a_mended_loss_is_charged_to_its_node_once_that_is_convicted():
    observed = given_up()
    before = plan(observed, NOW + 10).status
    assert before.restarts is not None
    assert list(before.restarts.by_cause.values()) == [1]
    assert "NodeGone" not in before.restarts.by_cause
    judged = replace(
        observed,
        job=replace(observed.job, status=before),
        verdicts={"node-1": a_verdict("node-1", NodeState.GONE, marks={"verdict": NOW + 20})},
    )
    after = plan(judged, NOW + 20).status
    assert after.restarts is not None
    assert (after.restarts.by_cause, after.restarts.total) == ({"NodeGone": 1}, 1)


def test_a_death_before_the_pod_is_deleted_belongs_to_the_verdict_that_moved_its_slot():
    """The operator dies after it has moved the slot, and before it deletes the pod on the faulty node. There a rank
    dies again, a spare takes the place, and the next operator process judges the node anew, under another incident.
    """
    seen = a_seen(((0, 1), (1, 1), (2, 1)))
    verdict = a_verdict("node-1", NodeState.GONE)
    observed = an_observation(
        pods=tuple(map(a_pod, range(3))), seen=seen, verdicts={"node-1": verdict}
    )
    moved = plan(observed, NOW)
    assert raised(observed, moved) == {1: 2}
    (move,) = moved.status.incidents
    slots = [s.model_copy(update={"incident": None}) for s in moved.status.slots]
    closed = moved.status.model_copy(
        update={"incidents": [move.model_copy(update={"open": False})], "slots": slots}
    )
    died = a_mended_loss(cause="WorkerDied", message="rank 1 killed by signal 9", rung="restart")
    later = replace(
        observed,
        job=a_job(status=closed),
        pods=(a_pod(0), a_pod(2)),
        seen=replace(seen, incidents=(died,)),
        verdicts={"node-1": replace(verdict, incident="inc-9", marks={"verdict": NOW + 5})},
    )
    status = plan(later, NOW + 5).status
    links = [(i.cause, i.quarantine) for i in status.incidents]
    assert links == [("NodeGone", "inc-1"), ("WorkerDied", "inc-1")]
    assert status.restarts is not None
    assert status.restarts.by_cause == {"NodeGone": 1}


def test_a_mended_loss_bears_no_other_verdict():
    assert judged_later(given_up(), 200) == [("lm-1", None)], "so late a verdict is another fault"
    assert judged_later(given_up(), 20, node="node-4") == [("lm-1", None)], (
        "the verdict is on another node"
    )
    assert judged_later(given_up(), 20, state=NodeState.SUSPECT) == [("lm-1", None)]
    assert judged_later(given_up(cause="Leave"), 20) == [("lm-1", None)], "a leave is no loss"


def test_a_pod_that_leaves_because_it_is_deleted_with_its_node_bears_the_verdict_too():
    told = "poddeleted-1-1"
    assert judged_later(given_up(cause="Leave", id=told), 20) == [(told, "inc-1")]
    earlier = "poddeleted-1-0"
    assert judged_later(given_up(cause="Leave", id=earlier), 20) == [(earlier, None)]


def test_a_loss_of_the_slots_next_pod_bears_no_verdict_on_the_node_before():
    """Either the slot's next pod runs, or it is gone as well."""
    slots = [a_slot(0), a_slot(1, 2, node="node-4", former_node="node-1"), a_slot(2)]
    pods = (a_pod(0), a_pod(1, 2, node="node-4"), a_pod(2))
    died = a_mended_loss(cause="WorkerDied", rung="restart")
    seen = a_seen(((0, 1), (1, 2), (2, 1)), incidents=(died,))
    observed = an_observation(job=a_job(status=a_status(slots=slots)), pods=pods, seen=seen)
    assert judged_later(observed, 20) == [("lm-1", None)]
    (_, quarantine), *_ = judged_later(replace(observed, pods=(a_pod(0), a_pod(2))), 20)
    assert quarantine is None


@pytest.mark.parametrize(
    "container",
    [
        {"running_since": NOW + 20, "restarts": 1, "last_ended": an_end(code=137)},
        {"running_since": None, "ended": an_end(code=137)},
        {"running_since": None, "waiting": "CrashLoopBackOff", "last_ended": an_end(code=137)},
    ],
    ids=["runs-again", "ended", "waits"],
)
def test_a_container_that_dies_in_the_slots_next_pod_bears_no_verdict_on_the_node_before(container):
    """The kubelet restarts it in its pod, so it runs since a time after the loss."""
    slots = [a_slot(0), a_slot(1, 2, node="node-4", former_node="node-1"), a_slot(2)]
    pods = (a_pod(0), a_pod(1, 2, node="node-4", **container), a_pod(2))
    seen = a_seen(((0, 1), (2, 1)), incidents=(a_mended_loss(),))
    observed = an_observation(job=a_job(status=a_status(slots=slots)), pods=pods, seen=seen)
    assert judged_later(observed, 20) == [("lm-1", None)]

"""Pods that hold nodes and cannot train are deleted, the younger job's first."""

from dataclasses import replace

import pytest

from everstep_contract import levels
from everstep_operator.jobs import deadlines, gang, observe
from everstep_operator.jobs.actions import CreatePod, DeletePod, Plan
from everstep_operator.jobs.clocks import Clocks, measure
from everstep_operator.jobs.conditions import find_condition
from everstep_operator.jobs.observed import Observed, Pod, Refusal, Rival
from everstep_operator.jobs.plan import plan
from everstep_operator.jobs.rivals import Entry, Ranking
from everstep_operator.jobs.stamps import to_seconds, to_stamp
from everstep_operator.model_status import Condition, JobStatus
from job_builders import NOW, a_job, a_pod, a_seen, a_slot, a_spec, an_observation
from work import count

NO_ROOM = "0/4 nodes are available: 4 Insufficient nvidia.com/gpu."


def not_running(since: float) -> Condition:
    return Condition(
        type="Running", status="False", reason="Unschedulable", message=NO_ROOM,
        last_transition_time=to_stamp(since),
    )  # fmt: skip


def half_placed(*, waited: float = 301, replicas: int = 2, **spec: object) -> Observed:
    """A job whose slot 0 has a node and a waiting agent, while no other slot finds a node."""
    slots = [a_slot(s) for s in range(replicas)]
    status = JobStatus(slots=slots, conditions=[not_running(NOW - waited)], state="Pending")
    document = a_spec(replicas=replicas, **spec)
    nowhere = [
        a_pod(s, node="", ip="", phase="Pending", running_since=None, scheduling=NO_ROOM)
        for s in range(1, replicas)
    ]
    return an_observation(
        job=a_job(document, status=status), pods=(a_pod(0), *nowhere), seen=levels.Seen()
    )


def after(observed: Observed, planned: Plan, **changes: object) -> Observed:
    return replace(observed, job=replace(observed.job, status=planned.status), **changes)


def message(planned: Plan) -> str:
    found = find_condition(planned.status, "Running")
    assert found is not None
    assert found.reason == gang.REASON
    return found.message


def test_a_gang_that_stays_incomplete_gives_its_pods_back_and_says_when_it_tries_again() -> None:
    observed = half_placed()
    first = plan(observed, NOW)
    assert first.counts, "status is written before the pods are deleted"
    assert "only 1 of the 2 pods that the job needs" in message(first)
    assert NO_ROOM in message(first)
    counted = plan(after(observed, first), NOW + 1)
    assert counted.counts
    assert counted.status.restarts is not None
    assert counted.status.restarts.total == 0, "waiting for room is no failure"
    deleted = plan(after(observed, counted), NOW + 2)
    assert [a.name for a in deleted.actions if isinstance(a, DeletePod)] == ["lm-0-1", "lm-1-1"]
    idle = plan(after(observed, deleted, pods=()), NOW + 3)
    assert idle.actions == ()
    assert message(idle) == message(first), "the message must not change while nothing happens"
    assert idle.status.gang is not None
    retry = to_seconds(idle.status.gang.retry_at)
    assert retry is not None
    assert 30 - 1 <= retry - NOW <= 60
    assert idle.wake_after == pytest.approx(retry - NOW - 3)
    again = plan(after(observed, idle, pods=()), retry + 1)
    made = [a.body["metadata"]["name"] for a in again.actions if isinstance(a, CreatePod)]
    assert made == ["lm-0-2", "lm-1-2"]


def test_the_deadline_of_a_job_ends_in_the_pause_too() -> None:
    observed = half_placed(activeDeadlineSeconds=70)  # created a minute ago
    counted = plan(after(observed, plan(observed, NOW)), NOW + 1)
    idle = plan(after(observed, counted, pods=()), NOW + 3)
    assert idle.wake_after == pytest.approx(7)
    over = find_condition(plan(after(observed, idle, pods=()), NOW + 10.1).status, "Failed")
    assert over is not None
    assert over.reason == "DeadlineExceeded"


def test_a_clock_that_is_set_back_by_hours_does_not_prolong_the_pause() -> None:
    observed = half_placed()
    status = plan(observed, NOW).status
    gone = [r.model_copy(update={"pod_uid": None, "attempt": 2}) for r in status.slots]
    status = status.model_copy(update={"slots": gone})
    again = plan(replace(observed, job=replace(observed.job, status=status), pods=()), NOW - 7200)
    assert sum(isinstance(a, CreatePod) for a in again.actions) == 2


def test_it_waits_for_gang_seconds_anew_after_each_try_and_the_pauses_grow() -> None:
    observed = half_placed()
    status = plan(observed, NOW).status
    assert status.gang is not None
    retry = to_seconds(status.gang.retry_at) or 0.0
    tried = replace(observed, job=replace(observed.job, status=status))
    assert not plan(tried, retry + 299).counts
    second = plan(tried, retry + 301).status.gang
    assert second is not None
    assert second.tries == 2
    pauses = [gang.build_pause("uid", n) for n in range(1, 8)]
    assert pauses[:3] == sorted(pauses[:3])
    assert all(30 <= p <= 1200 for p in pauses)
    assert len({gang.build_pause(f"uid-{n}", 1) for n in range(20)}) == 20


def test_a_job_that_gets_room_after_a_long_wait_is_not_short_of_it_at_once() -> None:
    """The scheduler places one pod after another, and the first one wakes the operator."""
    clocks, placed = Clocks(), half_placed(waited=7200)
    nowhere = replace(placed.pods[1], slot=0, name="lm-0-1", uid="uid-0-1")
    waiting = replace(placed, pods=(nowhere, placed.pods[1]))
    assert gang.decide_gang(measure(clocks, waiting, 0.0), NOW) is None
    first = plan(measure(clocks, placed, 1.0), NOW + 1)
    assert not first.counts
    assert first.wake_after == pytest.approx(300 + deadlines.MARGIN_SECONDS)
    assert gang.decide_gang(measure(clocks, placed, 300.0), NOW + 300) is None
    assert gang.decide_gang(measure(clocks, placed, 301.0), NOW + 301) is not None


def test_a_gang_that_loses_a_pod_before_it_trains_waits_for_another_one() -> None:
    clocks, short = Clocks(), half_placed(waited=7200)
    complete = replace(short, pods=(short.pods[0], a_pod(1, running_since=None)))
    assert gang.decide_gang(measure(clocks, complete, 0.0), NOW) is None
    assert gang.decide_gang(measure(clocks, short, 600.0), NOW + 600) is None
    assert gang.decide_gang(measure(clocks, short, 900.0), NOW + 900) is not None


def test_enough_pods_for_min_replicas_are_kept() -> None:
    spec = a_spec(replicas=2)
    spec["workers"]["minReplicas"] = 1
    observed = half_placed()
    observed = replace(observed, job=a_job(spec, status=observed.job.status))
    assert gang.decide_gang(observed, NOW) is None


def test_a_job_without_a_single_node_holds_nothing_and_goes_on_waiting() -> None:
    observed = half_placed()
    assert gang.decide_gang(replace(observed, pods=observed.pods[1:]), NOW) is None


def test_what_waits_for_an_image_or_a_script_is_not_given_back() -> None:
    observed = half_placed()
    pulling = a_pod(1, phase="Pending", running_since=None, waiting="ImagePullBackOff")
    both = replace(observed, pods=(a_pod(0), pulling))
    assert gang.decide_gang(both, NOW) is None


def test_a_quota_that_lets_only_some_pods_in_is_no_reason_to_hold_them() -> None:
    observed = half_placed()
    refusal = Refusal(invalid=False, message="exceeded quota: team", generation=1, at=NOW - 5)
    held = replace(observed, pods=observed.pods[:1], refusal=refusal)
    found = gang.decide_gang(held, NOW)
    assert found is not None
    assert "exceeded quota: team" in found.message


def test_the_older_of_two_jobs_waits_until_the_younger_has_given_back() -> None:
    observed = half_placed()
    younger = Rival(holds=True)
    assert gang.decide_gang(replace(observed, rivals=(younger,)), NOW) is None
    gave = Rival(holds=False, gave_back_at=NOW - 10)
    assert gang.decide_gang(replace(observed, rivals=(gave,)), NOW) is None
    assert gang.decide_gang(replace(observed, rivals=(gave,)), NOW + 291) is not None


def test_of_two_jobs_one_is_the_younger_whatever_their_clocks() -> None:
    holds = Rival(holds=True)
    one, two = (NOW, "a"), (NOW, "b")
    ranking = Ranking([Entry(age=age, key=("team", age[1]), rival=holds) for age in (one, two)])
    assert ranking.find_younger(one) == (holds,)
    assert ranking.find_younger(two) == ()


def test_a_look_for_rivals_costs_the_same_among_a_thousand_jobs_as_among_ten() -> None:
    """Regression: each of n waiting jobs looked at the pods of all others."""

    def work(jobs: int) -> int:
        ages = [(NOW + n, str(n)) for n in range(jobs)]
        ranking = Ranking([Entry(age=a, key=("team", a[1]), rival=Rival(holds=True)) for a in ages])
        return count(lambda: [ranking.find_younger(ages[n]) for n in (0, jobs // 2, jobs - 1)])

    assert work(1000) == work(10)


def test_a_rival_is_one_that_has_some_nodes_and_lacks_others() -> None:
    def pod(node: str, phase: str = "Pending") -> Pod:
        return a_pod(0, node=node, phase=phase)

    job = {
        "metadata": {"uid": "u", "creationTimestamp": to_stamp(NOW)},
        "spec": a_spec(replicas=2),
        "status": {},
    }
    assert observe.to_rival(job, [pod("n"), pod("")]).holds
    assert not observe.to_rival(job, [pod("n"), pod("m")]).holds
    assert not observe.to_rival(job, [pod(""), pod("")]).holds
    assert not observe.to_rival(job, [pod("n", "Succeeded"), pod("")]).holds
    dead = replace(pod("dead", "Running"), deleting_until=NOW)
    assert not observe.to_rival(job, [dead, pod("")]).holds, "it has nothing to give back"
    enough = {**job, "spec": {"workers": {"replicas": 2, "minReplicas": 1}}}
    assert not observe.to_rival(enough, [pod("n"), pod("")]).holds, "it keeps its nodes, and trains"


def test_state_that_the_waiting_workers_hold_is_saved_before_they_go() -> None:
    observed = half_placed()
    status = observed.job.status.model_copy(update={"epoch": 3, "step": 40})
    seen = a_seen(members=(), epoch=3, running=False)
    observed = replace(observed, job=replace(observed.job, status=status), seen=seen)
    first = plan(observed, NOW)
    asked = plan(after(observed, first), NOW + 1)
    assert not asked.counts
    assert asked.wanted is not None
    assert asked.wanted.stop is levels.Stop.SUSPEND
    stopped = replace(seen, stopped=levels.Stopped(epoch=3, step=42))
    assert plan(after(observed, asked, seen=stopped), NOW + 2).counts


def test_a_job_that_trains_forgets_that_it_ever_gave_back() -> None:
    observed = half_placed()
    status = plan(observed, NOW).status
    job = replace(observed.job, status=status)
    trains = replace(observed, job=job, pods=(a_pod(0), a_pod(1)), seen=a_seen(((0, 1), (1, 1))))
    assert plan(trains, NOW + 1).status.gang is None


def test_what_cannot_be_saved_is_not_given_up_to_make_room() -> None:
    observed = half_placed()
    seen = a_seen(members=(), epoch=3, running=False)
    away = replace(seen, storage_error=levels.StorageError(kind="Unreachable", message="away"))
    assert gang.decide_gang(replace(observed, seen=away), NOW) is None
    status = plan(observed, NOW).status.model_copy(update={"epoch": 3})
    asked = replace(observed, job=replace(observed.job, status=status), seen=seen)
    assert status.gang is not None
    retry = to_seconds(status.gang.retry_at) or 0.0
    assert not plan(asked, retry - 1).counts, "the job has not reported a save yet"
    assert plan(asked, retry + 1).wanted is not None
    assert plan(asked, retry + 1).wanted.stop is levels.Stop.NONE, "the job must keep waiting"

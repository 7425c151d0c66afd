"""The contract with a queueing controller (Kueue), which flips `spec.suspend` and reads the status.

A suspended job has no pods. The queue's label is on the job only. The pods get what the queue writes into
the template while the job waits. If the queue changes the number of workers while the job runs (partial
admission), that is a resize: nobody restarts.
"""

from typing import Any

from everstep_contract.levels import Stop
from everstep_operator.jobs.actions import CreatePod, Plan
from everstep_operator.jobs.conditions import find_condition
from everstep_operator.jobs.observed import Observed
from everstep_operator.jobs.plan import plan
from job_builders import NOW, TEMPLATE, a_job, a_slot, a_spec, a_status, an_observation

QUEUE = "kueue.x-k8s.io/queue-name"


def a_queued_job(*, suspend: bool, **template: Any) -> Observed:
    spec = a_spec(suspend=suspend)
    spec["workers"] = {**spec["workers"], "template": {**TEMPLATE, **template}}
    return an_observation(job=a_job(spec), pods=(), seen=None)


def pods(planned: Plan) -> list[CreatePod]:
    return [action for action in planned.actions if isinstance(action, CreatePod)]


def condition(planned: Plan, kind: str) -> str:
    found = find_condition(planned.status, kind)
    return found.status if found else "absent"


def test_a_job_that_is_suspended_from_its_birth_has_no_pod_and_says_so() -> None:
    planned = plan(a_queued_job(suspend=True), NOW)
    assert planned.actions == ()
    assert planned.status.state == "Suspended"
    assert condition(planned, "Suspended") == "True"
    assert planned.status.world is not None
    assert (planned.status.world.ready, planned.status.world.desired) == (0, 0)


def test_admitted_it_makes_all_its_pods() -> None:
    planned = plan(a_queued_job(suspend=False), NOW)
    assert [action.slot for action in pods(planned)] == [0, 1, 2]
    assert condition(planned, "Suspended") == "False"


def test_what_the_queue_writes_into_the_template_is_what_the_pods_get() -> None:
    spec = {**TEMPLATE["spec"], "nodeSelector": {"pool": "reserved"}}
    planned = plan(a_queued_job(suspend=False, spec=spec), NOW)
    assert all(a.body["spec"]["nodeSelector"] == {"pool": "reserved"} for a in pods(planned))


def test_the_queues_label_is_the_jobs_and_not_the_pods() -> None:
    """The queue would treat a pod with this label as a second workload of its own."""
    for action in pods(plan(a_queued_job(suspend=False), NOW)):
        assert not any(
            key.startswith("kueue.x-k8s.io/") for key in action.body["metadata"]["labels"]
        )


# --- partial admission -----------------------------------------------------------------------------


def a_running_job(replicas: int, **status: Any) -> Observed:
    """Three slots train, and the queue has set this number of workers."""
    return an_observation(job=a_job(a_spec(replicas=replicas), status=a_status(**status)))


def requests(planned: Plan) -> tuple[int, tuple[int, ...], Stop]:
    assert planned.wanted is not None
    return planned.wanted.want_workers, planned.wanted.leave, planned.wanted.stop


def interruptions(planned: Plan) -> int:
    return planned.status.restarts.total if planned.status.restarts else 0


def test_workers_that_the_queue_takes_back_leave_and_the_others_train_on() -> None:
    planned = plan(a_running_job(1), NOW)
    assert requests(planned) == (1, (1, 2), Stop.NONE)
    assert planned.actions == ()
    assert interruptions(planned) == 0


def test_workers_that_the_queue_adds_get_pods_and_nobody_is_stopped() -> None:
    planned = plan(a_running_job(5), NOW)
    assert [action.slot for action in pods(planned)] == [3, 4]
    assert requests(planned) == (5, (), Stop.NONE)
    assert interruptions(planned) == 0


def test_a_suspension_that_is_taken_back_with_fewer_workers_is_a_resize() -> None:
    """The pods are still there: the job had not saved yet."""
    planned = plan(a_running_job(2, stopping_since="2026-11-25T10:00:00Z"), NOW)
    assert requests(planned) == (2, (2,), Stop.NONE)
    assert planned.actions == ()
    assert planned.status.stopping_since is None


def test_admitted_again_with_fewer_workers_it_makes_only_these() -> None:
    """Its pods ended with the suspension, so there is nothing to resize."""
    ended = [a_slot(s, 2, pod_uid=None, node=None, cause="Suspended") for s in range(3)]
    job = a_job(a_spec(replicas=2), status=a_status(slots=ended))
    planned = plan(an_observation(job=job, pods=(), seen=None), NOW)
    assert [(action.slot, action.attempt) for action in pods(planned)] == [(0, 2), (1, 2)]
    assert interruptions(planned) == 0

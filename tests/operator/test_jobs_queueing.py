"""The contract with a queueing controller (Kueue), which flips `spec.suspend` and reads the status.

A suspended job has no pods. The queue's label is on the job only. What the queue writes into the
template while the job waits is what the pods get.
"""

from typing import Any

from everstep_operator.jobs.actions import CreatePod, Plan
from everstep_operator.jobs.conditions import find_condition
from everstep_operator.jobs.observed import Observed
from everstep_operator.jobs.plan import plan
from job_builders import NOW, TEMPLATE, a_job, a_spec, an_observation

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

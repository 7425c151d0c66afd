"""Why a job trains with fewer pods than it wants."""

from dataclasses import replace
from typing import Any

import pytest

from everstep_operator.jobs.conditions import find_condition
from everstep_operator.jobs.observed import Observed, Refusal
from everstep_operator.jobs.plan import plan
from everstep_operator.model_status import SlotStatus
from job_builders import NOW, a_job, a_pod, a_slot, a_spec, a_status, an_end, an_observation


def elastic(**changes: Any) -> Observed:
    """Three of four pods train, which is enough."""
    spec = a_spec(replicas=4)
    spec["workers"] = {**spec["workers"], "minReplicas": 2}
    slots = [*(a_slot(s) for s in range(3)), SlotStatus(slot=3, attempt=1)]
    job = a_job(spec, status=a_status(slots=slots))
    return replace(an_observation(job=job), **changes)


QUOTA = Refusal(invalid=False, message="exceeded quota: gpus", generation=1, at=NOW - 5)
PENDING = {"phase": "Pending", "node": "", "running_since": None}
FULL = a_pod(3, scheduling="0/4 nodes are available", **PENDING)
BROKEN = a_pod(3, waiting="ImagePullBackOff", waiting_message="no such image", **PENDING)
RESTARTED = a_pod(3, waiting="CrashLoopBackOff", last_ended=an_end(code=1), **PENDING)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"refusal": QUOTA}, "exceeded quota: gpus"),
        ({"pods": (*an_observation().pods, FULL)}, "pod lm-3-1: 0/4 nodes are available"),
        ({"pods": (*an_observation().pods, BROKEN)}, "pod lm-3-1: no such image"),
        ({"pods": (*an_observation().pods, RESTARTED)}, "pod lm-3-1: it ended with 1"),
    ],
)
def test_a_job_that_trains_with_fewer_pods_than_it_wants_says_why(
    changes: dict[str, Any], words: str
) -> None:
    status = plan(elastic(**changes), NOW).status
    assert status.world is not None
    assert status.world.summary == "3/4"
    running = find_condition(status, "Running")
    assert running is not None
    assert (running.status, running.reason) == ("True", "Training")
    assert f"; not training yet: 1 of 4 pods ({words}" in running.message
    assert status.message == running.message


def test_while_a_refused_pod_is_tried_again_the_sentence_does_not_change() -> None:
    before, after = (plan(elastic(refusal=QUOTA), now).status.message for now in (NOW, NOW + 60))
    assert before == after


@pytest.mark.parametrize("pods", [(), (a_pod(3, **{**PENDING, "node": "node-3"}),), (a_pod(3),)])
def test_a_pod_that_is_on_its_way_is_no_shortage(pods: tuple[Any, ...]) -> None:
    observed = elastic(pods=(*an_observation().pods, *pods))
    assert plan(observed, NOW).status.message == "3 ranks train (membership epoch 1)"

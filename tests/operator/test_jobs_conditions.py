"""What a job's status says while no agent is heard."""

from dataclasses import replace

from everstep_contract import levels
from everstep_operator.jobs.conditions import find_condition
from everstep_operator.jobs.observed import Observed
from everstep_operator.jobs.plan import plan
from everstep_operator.model_status import Condition, JobStatus
from job_builders import NOW, a_seen, an_observation


def condition(status: JobStatus, kind: str) -> Condition:
    found = find_condition(status, kind)
    assert found is not None
    return found


def with_status(observed: Observed, status: JobStatus) -> Observed:
    return replace(observed, job=replace(observed.job, status=status))


def test_an_operator_that_has_just_started_does_not_call_a_broken_store_healthy() -> None:
    error = levels.StorageError(kind="Unreachable", message="no route to the store")
    broken = plan(an_observation(seen=a_seen(storage_error=error)), NOW).status
    assert condition(broken, "CheckpointHealthy").reason == "Unreachable"
    started = with_status(an_observation(seen=None, callers=frozenset()), broken)
    planned = plan(started, NOW + 5)
    assert condition(planned.status, "CheckpointHealthy") == condition(broken, "CheckpointHealthy")
    assert planned.events == ()
    repaired = plan(with_status(an_observation(), planned.status), NOW + 6).status
    assert condition(repaired, "CheckpointHealthy").status == "True"


def test_pods_that_train_on_under_a_spec_without_effect_still_count() -> None:
    trained = plan(an_observation(), NOW).status
    edited = with_status(an_observation(seen=None, callers=frozenset()), trained)
    edited = replace(edited, job=replace(edited.job, spec=None, spec_error="spec.guard: …"))
    status = plan(edited, NOW + 60).status
    assert status.state == "Invalid"
    assert status.world is not None
    assert status.world.ready == 3
    two = replace(edited, pods=edited.pods[:2])
    status = plan(two, NOW + 60).status
    assert status.world is not None
    assert status.world.ready == 2

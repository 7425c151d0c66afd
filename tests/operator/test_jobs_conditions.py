"""What a job's status says while no agent is heard."""

from dataclasses import replace

from everstep_contract import levels
from everstep_contract.levels import CheckpointRef, Scope
from everstep_contract.report import Cause
from everstep_operator.jobs.clocks import Clocks, measure
from everstep_operator.jobs.conditions import find_condition
from everstep_operator.jobs.observed import Observed
from everstep_operator.jobs.plan import plan
from everstep_operator.model_status import Condition, JobStatus
from job_builders import NOW, a_job, a_pod, a_seen, a_spec, a_status, an_end, an_observation


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


def test_a_checkpoint_is_late_only_if_the_job_takes_steps() -> None:
    """`everySeconds` is 60, so it is late after 240 s. The job pauses for half an hour."""
    spec = a_spec(checkpoint={"uri": "s3://bucket/folder", "everySeconds": 60})
    clocks, status = Clocks(), a_status()

    def reason(at: float, scope: Scope) -> str:
        nonlocal status
        seen = a_seen(committed=CheckpointRef(epoch=1, step=25, age_ms=round(at * 1000)))
        seen = replace(seen, members=tuple(replace(m, scope=scope) for m in seen.members))
        observed = an_observation(job=a_job(spec, status=status), seen=seen)
        status = plan(measure(clocks, observed, at), NOW + at).status
        return condition(status, "CheckpointHealthy").reason

    paused = [reason(at, Scope.PAUSE) for at in (10, 300, 1790)]
    assert paused == ["CheckpointCommitted"] * 3
    steps = [reason(at, Scope.STEP) for at in (1800, 1850, 1870)]
    assert steps == ["CheckpointCommitted", "CheckpointCommitted", "CheckpointLate"]
    assert reason(1900, Scope.PAUSE) == "CheckpointLate", "another pause repairs nothing"


def test_a_job_that_trains_again_after_a_night_has_an_interval_for_its_first_save() -> None:
    """A coordinator makes its first save by the clock `everySeconds` (60) after all ranks have started."""
    spec = a_spec(checkpoint={"uri": "s3://bucket/folder", "everySeconds": 60})
    night, clocks, status = 30_000, Clocks(), a_status()

    def reason(at: float, *, running: bool) -> str:
        nonlocal status
        ref = CheckpointRef(epoch=1, step=25, age_ms=round((night + at) * 1000))
        observed = an_observation(
            job=a_job(spec, status=status), seen=a_seen(committed=ref, running=running)
        )
        status = plan(measure(clocks, observed, at), NOW + at).status
        return condition(status, "CheckpointHealthy").reason

    assert reason(0, running=False) == "CheckpointCommitted"
    found = [reason(at, running=True) for at in (10, 80, 130, 140)]
    assert found == ["CheckpointCommitted"] * 3 + ["CheckpointLate"]


def test_a_note_about_a_pod_ends_with_its_reason_and_the_others_stay() -> None:
    refused = "slot 2: its rank cannot join: no such mount"
    happened = "slot 1 leaves without a checkpoint, because none was committed within 5 s"
    status = a_status(notes=[happened, refused])
    for running, left in ((False, [happened, refused]), (True, [happened])):
        seen = a_seen(running=running)
        assert plan(an_observation(job=a_job(status=status), seen=seen), NOW).status.notes == left


def test_a_complete_job_shows_its_last_step_although_the_coordinator_was_last_heard_before_it() -> (
    None
):
    pods = [a_pod(slot, ended=an_end(Cause.DONE, code=0, done=True, step=60)) for slot in range(3)]
    for seen in (a_seen(step=57), a_seen(step=57, done=True), None):
        over = an_observation(pods=pods, seen=seen)
        status = plan(over, NOW).status
        assert (status.state, status.step) == ("Complete", 60)
        assert "at step 60" in condition(status, "Complete").message
        later = replace(with_status(over, status), seen=a_seen(step=57), pods=())
        assert plan(later, NOW + 5).status.step == 60

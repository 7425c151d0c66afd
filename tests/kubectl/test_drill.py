import pytest

from everstep_kubectl import drill, incidents
from kubectl import recordings
from kubectl.recordings import with_condition


def a_job(**status: object) -> dict:
    job = recordings.job(**status)
    job["metadata"]["annotations"] = {"everstep.dev/drill": "allowed"}
    return job


def test_a_job_that_did_not_opt_in_is_left_alone() -> None:
    metadata = {"name": "tiny", "namespace": "team"}
    refused = drill.plan_drill(recordings.job() | {"metadata": metadata}, None)
    assert isinstance(refused, drill.Refused)
    assert "kubectl annotate rtj -n team tiny everstep.dev/drill=allowed" in refused.message


@pytest.mark.parametrize(
    ("job", "said"),
    [
        (with_condition(a_job(), "Running", "False"), "a drill needs a job that runs"),
        (with_condition(a_job(), "Recovering", "True"), "a drill needs a job that runs"),
        (with_condition(a_job(), "CheckpointHealthy", "False", "Slow"), "not safe now: Slow"),
        (a_job(checkpoint=None), "has no checkpoint yet"),
        (recordings.deleted(a_job()), "tiny is being deleted"),
    ],
)
def test_no_drill_meets_a_job_in_trouble(job: dict, said: str) -> None:
    refused = drill.plan_drill(job, None)
    assert isinstance(refused, drill.Refused)
    assert said in refused.message


def test_the_last_slots_pod_is_deleted_by_its_uid() -> None:
    target = drill.plan_drill(a_job(), None)
    assert isinstance(target, drill.Target)
    assert (target.pod, target.slot, target.attempt) == ("tiny-1-3", 1, 3)
    gentle = drill.build_delete(target, sudden=False)
    assert gentle["preconditions"] == {"uid": target.uid}
    assert "gracePeriodSeconds" not in gentle
    assert drill.build_delete(target, sudden=True)["gracePeriodSeconds"] == 1


def test_no_spare_and_no_slot_without_a_pod_is_chosen() -> None:
    job = a_job(spares={"slots": [1]})
    job["status"]["slots"].append({"slot": 7, "attempt": 2})
    target = drill.plan_drill(job, None)
    assert isinstance(target, drill.Target)
    assert target.slot == 0
    refused = drill.plan_drill(job, 1)
    assert isinstance(refused, drill.Refused)
    assert refused.message == "slot 1 is a spare: its loss interrupts nothing; choose one of [0]"


def test_a_slot_that_there_is_not_is_named_with_those_there_are() -> None:
    refused = drill.plan_drill(a_job(), 7)
    assert refused == drill.Refused(message="tiny has no slot 7; it has [0, 1]")


def test_it_has_recovered_when_the_next_attempt_steps_beyond_the_checkpoint() -> None:
    found = incidents.build_incidents(a_job())[0]
    target = drill.Target(pod="tiny-1-2", uid="u", slot=1, attempt=2, node="node-2")
    assert drill.is_recovered(a_job(), target, found)
    assert not drill.is_recovered(a_job(step=found.checkpoint_step), target, found)
    assert not drill.is_recovered(with_condition(a_job(), "Running", "False"), target, found)
    newest = drill.Target(pod="tiny-1-3", uid="u", slot=1, attempt=3, node="node-2")
    assert not drill.is_recovered(a_job(), newest, found)


def test_the_incident_of_the_drill_is_a_new_one_of_its_slot() -> None:
    found = incidents.build_incidents(a_job())
    before = frozenset({"inc-7b7c4a3c08"})
    assert drill.find_incident(found, before, 1) == found[1]
    assert drill.find_incident(found, frozenset(i.id for i in found), 1) is None

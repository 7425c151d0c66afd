"""API objects → values, and statuses → patches."""

from typing import Any

from everstep_contract import names, report
from everstep_contract.report import Cause, ExitReport
from everstep_operator.jobs import observe, statuspatch
from everstep_operator.jobs.genuine import Place
from everstep_operator.jobs.observed import Pod
from everstep_operator.jobs.stamps import to_stamp
from everstep_operator.model_status import JobStatus, Restarts
from everstep_operator.world import Mirror
from job_builders import NOW, UID, a_spec


def an_object(**status: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "name": "lm-0-1", "namespace": "team", "uid": "u1", "resourceVersion": "5",
        },
        "spec": {"nodeName": "node-1"},
        "status": {"phase": "Running", **status},
    }  # fmt: skip


def read(**status: Any) -> Pod:
    return observe.to_pod(an_object(**status), Place(slot=0, attempt=1))


def test_the_exit_report_is_read_from_the_termination_message() -> None:
    message = report.encode(ExitReport(cause=Cause.USER_ERROR, message="boom", rank=1)).decode()
    state = {"terminated": {"exitCode": 0, "reason": "Completed", "message": message}}
    pod = read(containerStatuses=[{"name": "trainer", "state": state}])
    assert pod.ended is not None
    assert pod.ended.report is not None
    assert pod.ended.report.cause is Cause.USER_ERROR


def test_a_message_that_is_not_ours_is_no_report() -> None:
    state = {"terminated": {"exitCode": 1, "message": '{"cause": "Nonsense"}'}}
    pod = read(containerStatuses=[{"name": "trainer", "state": state}])
    assert pod.ended is not None
    assert pod.ended.report is None


def test_the_trainer_is_found_among_side_cars() -> None:
    statuses = [
        {
            "name": "log",
            "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}},
            "restartCount": 9,
        },
        {
            "name": "trainer",
            "state": {"waiting": {"reason": "ErrImagePull", "message": "no"}},
            "restartCount": 1,
        },
    ]
    pod = read(containerStatuses=statuses)
    assert (pod.waiting, pod.restarts) == ("ErrImagePull", 1)


def test_a_trainer_with_another_name_is_found_beside_a_container_that_a_webhook_has_added() -> None:
    pod = an_object(
        containerStatuses=[
            {"name": "istio-proxy", "restartCount": 1, "state": {"running": {}}},
            {"name": "main", "restartCount": 0, "state": {"waiting": {"reason": "ErrImagePull"}}},
        ]
    )
    port = {"name": names.AGENT_PORT_NAME, "containerPort": names.AGENT_PORT}
    pod["spec"]["containers"] = [
        {"name": "istio-proxy", "ports": [{"containerPort": 15090}]},
        {"name": "main", "ports": [port]},
    ]
    found = observe.to_pod(pod, Place(slot=0, attempt=1))
    assert (found.restarts, found.waiting, found.running_since) == (0, "ErrImagePull", None)
    del pod["status"]["containerStatuses"][1]
    found = observe.to_pod(pod, Place(slot=0, attempt=1))
    assert found.restarts == 0, "the trainer has no status yet"


def test_a_status_that_somebody_has_spoilt_counts_as_none() -> None:
    metadata = {"name": "lm", "namespace": "team", "uid": UID}
    job = observe.to_job({"metadata": metadata, "spec": a_spec(), "status": {"slots": "none"}})
    assert job.status == JobStatus()


def test_a_spec_that_cannot_be_read_is_told_and_not_raised() -> None:
    metadata = {"name": "lm", "namespace": "team", "uid": UID}
    job = observe.to_job({"metadata": metadata, "spec": {"workers": {"replicas": -1}}})
    assert job.spec is None
    assert "spec.workers" in job.spec_error


def patch_of(old: dict[str, Any], status: JobStatus, now: float = NOW) -> dict[str, Any]:
    return statuspatch.decide_patch(old, status, now, 10.0)


def test_figures_wait_and_conditions_do_not() -> None:
    status = JobStatus(state="Running", step=10, restarts=Restarts(total=0))
    old = {**statuspatch.to_document(status), "observedAt": to_stamp(NOW - 4)}
    assert patch_of(old, status.model_copy(update={"step": 11})) == {}
    assert patch_of(old, status.model_copy(update={"step": 11}), NOW + 6)["step"] == 11
    urgent = patch_of(old, status.model_copy(update={"step": 11, "state": "Recovering"}))
    assert (urgent["state"], urgent["step"]) == ("Recovering", 11)


def test_nothing_new_is_nothing_to_write_however_long_ago() -> None:
    status = JobStatus(state="Running", step=10)
    old = {**statuspatch.to_document(status), "observedAt": to_stamp(NOW - 4000)}
    assert patch_of(old, status) == {}


def test_what_is_gone_becomes_null_in_the_patch() -> None:
    old = statuspatch.to_document(
        JobStatus(state="Suspending", stopping_since="2026-01-01T00:00:00Z")
    )
    assert patch_of(old, JobStatus(state="Running"))["stoppingSince"] is None


def test_an_older_copy_never_replaces_a_newer_one() -> None:
    mirror = Mirror()
    newer, older = an_object(phase="Failed"), an_object()
    newer["metadata"]["resourceVersion"] = "10"
    assert mirror.put(newer)
    assert not mirror.put(older)
    mirror.drop({**older, "metadata": {**older["metadata"], "uid": "an earlier life"}})
    assert len(mirror) == 1


def test_a_list_that_was_begun_before_a_deletion_does_not_bring_the_object_back() -> None:
    """The pages of a long list show one moment. Before, such a pod stood until the next full list."""
    mirror, pod = Mirror(), an_object()
    mirror.put(pod)
    mirror.drop({**pod, "metadata": {**pod["metadata"], "resourceVersion": "25"}})
    mirror.replace([pod], "20")
    assert len(mirror) == 0
    next_life = {**pod, "metadata": {**pod["metadata"], "uid": "next", "resourceVersion": "27"}}
    mirror.put(next_life)
    mirror.replace([pod], "22")
    assert mirror.get("lm-0-1", "team")["metadata"]["uid"] == "next"
    mirror.replace([next_life], "30")
    assert mirror._deleted == {}, "no later list can show it"


def test_a_list_shows_what_had_gone_without_an_event() -> None:
    mirror = Mirror()
    mirror.put(an_object())
    fresh = an_object()
    fresh["metadata"] = {**fresh["metadata"], "name": "younger", "resourceVersion": "30"}
    mirror.put(fresh)
    lost = mirror.replace([], "20")
    assert [o["metadata"]["name"] for o in lost] == ["lm-0-1"]
    assert mirror.get("younger", "team") is not None, "it is newer than the list"


def test_figures_of_many_jobs_together_leave_room_for_what_cannot_wait() -> None:
    assert statuspatch.choose_figures_seconds(10.0, 3, 25.0) == 10.0
    assert statuspatch.choose_figures_seconds(10.0, 250, 25.0) == 10.0
    assert statuspatch.choose_figures_seconds(10.0, 1000, 25.0) == 40.0

"""A status write contains only what changed: a few hundred bytes for one slot of two thousand."""

import json
from dataclasses import replace
from typing import Any

import pytest

from everstep_operator import kube
from everstep_operator.jobs import genuine, patch_body, statuspatch
from everstep_operator.jobs.actions import Plan
from everstep_operator.jobs.apply import Pace, apply_plan
from everstep_operator.model_status import JobStatus, StartFailure
from job_builders import NOW, a_job, a_status
from patches import DoesNotFit, apply_operations, merge
from toy_jobs import ToyCluster

SLOTS = 2000
FEW_HUNDRED_BYTES = 400


def a_document(slots: int = SLOTS) -> dict[str, Any]:
    status = a_status(slots)
    found = [s.model_copy(update={"pod_uid": f"uid-{s.slot}"}) for s in status.slots]
    return statuspatch.to_document(status.model_copy(update={"slots": found}))


def with_slot(document: dict[str, Any], index: int, **changes: Any) -> dict[str, Any]:
    slots = list(document["slots"])
    slots[index] = {**slots[index], **changes}
    return {**document, "slots": slots}


def bodies(old: dict[str, Any], new: dict[str, Any]) -> list[Any]:
    return patch_body.build_bodies("7", old, statuspatch.build_patch(old, new))


def applied(body: Any, old: dict[str, Any]) -> dict[str, Any]:
    obj = {"metadata": {"resourceVersion": "7"}, "status": old}
    patched = apply_operations(obj, body) if isinstance(body, list) else merge(obj, body)
    status: dict[str, Any] = patched["status"]
    return status


def test_one_slot_of_many_is_a_few_hundred_bytes() -> None:
    old = a_document()
    new = with_slot(old, 1234, node="node-99", podUid="another")
    shorter, whole = bodies(old, new)
    assert len(json.dumps(whole)) > 100_000
    assert len(json.dumps(shorter)) < FEW_HUNDRED_BYTES
    assert applied(shorter, old) == applied(whole, old) == new


CHANGES: dict[str, Any] = {
    "a field of a slot appears": lambda d: with_slot(d, 3, cause="NodeLost"),
    "a field of a slot goes": lambda d: {**d, "slots": [{"slot": 0, "attempt": 1}, *d["slots"][1:]]},
    "slots are added": lambda d: {**d, "slots": [*d["slots"], {"slot": 90, "attempt": 1}]},
    "slots go": lambda d: {**d, "slots": d["slots"][:-2]},
    "all slots go": lambda d: {k: v for k, v in d.items() if k != "slots"},
    "all slots change": lambda d: {**d, "slots": [{**s, "attempt": 9} for s in d["slots"]]},
    "a key needs an escape": lambda d: {**with_slot(d, 1, node="n"), "a/b~c": {"d/e": 1}},
    "a list in a list": lambda d: with_slot(d, 2, startFailures=[{"node": "a", "at": "t", "reason": "r"}]),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_body_leaves_the_same_status(change: Any) -> None:
    old = a_document(40)
    new = change(old)
    found = bodies(old, new)
    assert [applied(body, old) for body in found] == [new] * len(found)


def test_what_has_no_list_goes_as_a_merge_patch() -> None:
    old = a_document(4)
    assert bodies(old, {**old, "step": 7}) == [
        {"metadata": {"resourceVersion": "7"}, "status": {"step": 7}}
    ]


def test_a_patch_for_another_list_does_not_fit() -> None:
    old = a_document(40)
    shorter, _ = bodies(old, with_slot(old, 39, node="node-99"))
    with pytest.raises(DoesNotFit):
        applied(shorter, {**old, "slots": old["slots"][:5]})


async def a_stored_job(status: dict[str, Any]) -> tuple[ToyCluster, Any]:
    cluster = ToyCluster()
    metadata = {"name": "lm", "namespace": "team", "generation": 1}
    stored = cluster.put(kube.JOBS, {"metadata": metadata, "status": status})
    job = a_job(status=JobStatus.model_validate(status))
    version = stored["metadata"]["resourceVersion"]
    return cluster, replace(job, resource_version=version, raw_status=status)


async def write(cluster: ToyCluster, job: Any, status: JobStatus) -> Any:
    keys = genuine.derive_keys(b"k" * 32, job.uid)
    return await apply_plan(
        cluster,  # type: ignore[arg-type]
        job,
        Plan(status=status),
        keys,
        NOW,
        Pace(figures_seconds=0.0),
    )


def changed(job: Any) -> JobStatus:
    failure = StartFailure(node="node-1", at="2026-01-01T00:00:00Z", reason="r")
    slots = list(job.status.slots)
    slots[-1] = slots[-1].model_copy(update={"start_failures": [failure]})
    status: JobStatus = job.status.model_copy(update={"slots": slots})
    return status


async def test_a_job_that_somebody_else_has_changed_is_not_written_over() -> None:
    document = a_document(40)
    cluster, job = await a_stored_job(document)
    cluster.job()["status"] = {**document, "slots": document["slots"][:5]}
    cluster._touch(cluster.job())
    outcome = await write(cluster, job, changed(job))
    assert outcome.again
    assert outcome.patched is None
    assert len(cluster.job()["status"]["slots"]) == 5


async def test_what_was_observed_and_still_stands_is_written() -> None:
    cluster, job = await a_stored_job(a_document(40))
    outcome = await write(cluster, job, changed(job))
    assert outcome.patched is not None
    assert cluster.job()["status"]["slots"][-1]["startFailures"][0]["node"] == "node-1"
    assert cluster.cutter.writes == 1

"""After the most common mistakes a condition names the fix, and nothing restarts endlessly."""

import asyncio

import pytest

from everstep_contract import names
from everstep_demo.board import Board
from everstep_demo.runwatch import RunWatch
from everstep_demo.trial import NAMESPACE, URI, Trial, build_job
from everstep_lab import Lab
from everstep_lab.api import ApiError

pytestmark = [pytest.mark.lab, pytest.mark.timeout(180)]


async def refused(board: Board, job: dict) -> str:
    with pytest.raises(ApiError) as caught:
        await board.create(job)
    assert caught.value.status == 422
    return caught.value.message


async def test_a_wrong_resource_is_refused_with_the_field_and_the_fix(board: Board) -> None:
    job = build_job("wrong")
    job["spec"]["workers"]["minReplicas"] = 5
    message = await refused(board, job)
    assert "spec.workers.minReplicas" in message
    assert "lower minReplicas or raise replicas" in message

    message = await refused(board, build_job("wrong", uri="ftp://host/x"))
    assert "checkpoint" in message
    assert "s3://" in message

    message = await refused(board, build_job("a.b"))
    assert "metadata.name" in message

    job = build_job("wrong")
    job["spec"]["workers"]["template"]["spec"]["nodeName"] = "node-1"
    assert "nodeSelector" in await refused(board, job)


async def test_a_quarantine_is_not_withdrawn_by_an_edit_that_keeps_it(lab: Lab) -> None:
    path = f"/apis/{names.GROUP}/{names.VERSION}/{names.QUARANTINE_PLURAL}"
    spec = {
        "nodeName": "no-such-node", "incident": "i-1", "verdict": "Leaving", "reason": "GpuFatalXid",
        "message": "XID 79", "decidedAt": "2026-11-21T10:00:00Z",
    }  # fmt: skip
    body = {
        "apiVersion": f"{names.GROUP}/{names.VERSION}",
        "kind": names.QUARANTINE_KIND,
        "metadata": {"name": "edited"},
        "spec": {**spec, "cordon": False},
    }
    async with lab.api() as api:
        await api.create(path, body)
        try:
            await api.patch(f"{path}/edited", {"spec": {"cordon": True}})
            with pytest.raises(ApiError, match="to release the node, delete this object") as caught:
                await api.patch(f"{path}/edited", {"spec": {"cordon": False}})
            assert caught.value.status == 422
        finally:
            await api.delete(f"{path}/edited")


async def fails(lab: Lab, board: Board, job: dict, *, limit: float = 60.0) -> tuple[str, str]:
    """Return the reason and message of the job's Failed condition.

    Also check that no container restarts endlessly, and delete the job.
    """
    name = job["metadata"]["name"]
    await board.create(job)
    watch = RunWatch(URI, f"{NAMESPACE}/{name}", lab.store_environment)
    trial = Trial(name, board, watch)
    try:
        failed = await trial.until_condition("Failed", limit=limit)
        restarts = await trial.restarted_containers()
        pods = {p.name for p in await board.pods(name)}
        await asyncio.sleep(2.0)
        assert {p.name for p in await board.pods(name)} <= pods, "the failed job creates more pods"
        assert restarts <= 3
        return failed["reason"], failed["message"]
    finally:
        await board.delete(name)


async def test_a_script_that_raises_shows_its_exception(lab: Lab, board: Board) -> None:
    job = build_job(
        "raises", replicas=1, image="everstep/broken:test", command=("everstep", "run", "broken.py")
    )
    _, message = await fails(lab, board, job, limit=120)
    assert "no such column: labels" in message
    assert "step 3" in message


async def test_a_script_that_is_not_there_is_named(lab: Lab, board: Board) -> None:
    job = build_job("absent", replicas=1, command=("everstep", "run", "trian.py"))
    _, message = await fails(lab, board, job)
    assert "trian.py" in message


async def test_a_missing_bucket_is_named(lab: Lab, board: Board) -> None:
    job = build_job("bucketless", replicas=1, uri="s3://nowhere/tests")
    reason, message = await fails(lab, board, job)
    assert reason == "StoreUnusable"
    assert "nowhere" in message
    assert "bucket" in message.lower()


async def test_wrong_credentials_are_called_so_without_showing_them(lab: Lab, board: Board) -> None:
    job = build_job("keyless", replicas=1, env={"AWS_SECRET_ACCESS_KEY": "not-the-secret-key"})
    reason, message = await fails(lab, board, job)
    assert reason == "StoreUnusable"
    assert "AWS_" in message
    assert "not-the-secret-key" not in message


async def test_an_image_without_everstep_is_told_what_to_install(lab: Lab, board: Board) -> None:
    job = build_job("plain", replicas=1, image="plain/python:test")
    _, message = await fails(lab, board, job)
    assert "everstep" in message


async def test_a_container_whose_agent_never_calls_is_told_what_to_write(
    lab: Lab, board: Board
) -> None:
    job = build_job(
        "silent",
        replicas=1,
        image="plain/python:test",
        command=("python3", "-c", "import time; time.sleep(300)"),
        spec={"recovery": {"startupSeconds": 5}},
    )
    reason, message = await fails(lab, board, job)
    assert reason == "AgentNeverCalled"
    assert "everstep" in message
    assert "run" in message


async def test_an_image_that_cannot_be_pulled_is_in_the_message(lab: Lab, board: Board) -> None:
    name = "unpullable"
    await board.create(build_job(name, replicas=1, image="nobody/nothing:1"))
    watch = RunWatch(URI, f"{NAMESPACE}/{name}", lab.store_environment)
    trial = Trial(name, board, watch)

    async def told() -> bool:
        conditions = (await trial.job()).get("status", {}).get("conditions", [])
        return any("nobody/nothing:1" in c["message"] for c in conditions)

    await trial.until("the image's name in a condition", told, limit=40)
    await board.delete(name)

"""Somebody without the job's token takes a dead pod's address and answers the operator and agents."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from everstep_contract import codec, levels, names
from everstep_demo.board import Board, is_true
from everstep_demo.runwatch import RunWatch
from everstep_demo.trial import NAMESPACE, URI, Trial, build_job
from everstep_lab import Lab
from strangers import Stranger

pytestmark = [pytest.mark.lab, pytest.mark.timeout(240)]
NAME = "impersonated"


def build_lie() -> bytes:
    """Build a document that lies in every format: the run is done, failed and fenced, all have left, the
    sender coordinates, and the job is over.
    """
    seen = levels.Seen(
        epoch=1000,
        done=True,
        fenced="forged",
        failure=levels.Failure(cause="UserError", message="forged"),
        stopped=levels.Stopped(epoch=1000, step=1),
        left=tuple(levels.Left(slot=s, attempt=1, epoch=1000, step=1) for s in (0, 1)),
        coordinator=levels.SlotAttempt(slot=1, attempt=1),
    )
    document = json.loads(codec.dumps(seen))
    document |= {"slot": 1, "attempt": 1, "acting": True, "candidate": True, "term": "forged"}
    document |= {"version": 1 << 40, "address": "127.0.0.1:1", "round": 1000, "claimed": 1000}
    document |= {"end": {"cause": "UserError", "message": "forged"}, "seen": dict(document)}
    return json.dumps(document).encode()


@pytest.fixture
async def trial(lab: Lab, board: Board) -> AsyncIterator[Trial]:
    await board.create(build_job(NAME, spec={"recovery": {"nodeLostSeconds": 15}}))
    yield Trial(NAME, board, RunWatch(URI, f"{NAMESPACE}/{NAME}", lab.store_environment))
    await board.delete(NAME)


async def test_a_stranger_at_a_dead_pods_address_can_neither_end_the_job_nor_lead_it(
    lab: Lab, trial: Trial
) -> None:
    epoch = await trial.until_stepping()
    pod = await trial.board.current_pod(NAME, 1)
    assert pod is not None
    async with lab.api() as api:
        body = await api.get(f"/api/v1/namespaces/{NAMESPACE}/pods/{pod.name}")
    lab.fault(pod.node, kill_node=True)
    stranger = Stranger(build_lie(), token="of a job of its own")
    try:
        await until_bound(stranger, body["status"]["podIP"])

        async def all_asked() -> bool:
            return {"POST /v1/wanted HTTP/1.1", "POST /v1/who HTTP/1.1"} <= set(stranger.asked)

        await trial.until("operator and agent to ask the stranger", all_asked, limit=60)
        await trial.until_recovered(epoch, limit=120)
    finally:
        await stranger.stop()
        lab.heal(pod.node)
    job = await trial.job()
    assert not is_true(job, "Complete")
    assert not is_true(job, "Failed")
    assert await trial.steps_lost() == 0
    assert job["status"]["epoch"] < 1000
    said = [
        e["message"] for e in await trial.board.events(NAME) if e["reason"] == "AnswerNotProven"
    ]
    assert len(said) == 1, said
    assert pod.name in said[0]


async def until_bound(stranger: Stranger, address: str) -> None:
    """Start the stranger at the address as soon as the dead agent no longer occupies it."""
    async with asyncio.timeout(30):
        while True:
            try:
                await stranger.start(address, names.AGENT_PORT)
            except OSError:
                await asyncio.sleep(0.1)
            else:
                return

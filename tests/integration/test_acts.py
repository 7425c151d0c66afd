"""Both acts of the demo on a small job, then its end. The tests share one job and run in order."""

import pytest

from everstep_demo import faults
from everstep_demo.board import Board, Pod, condition
from everstep_demo.runwatch import RunWatch
from everstep_demo.trial import NAMESPACE, URI, Trial, build_job
from everstep_lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(240)]
NAME = "acts"
STEPS = 400


@pytest.fixture
async def trial(lab: Lab, board: Board) -> Trial:
    return await start_once(lab, board, build_job(NAME, env={"TINY_STEPS": str(STEPS)}))


async def start_once(lab: Lab, board: Board, job: dict) -> Trial:
    """Return this file's job. The first test that needs it creates it."""
    name = job["metadata"]["name"]
    watch = RunWatch(URI, f"{NAMESPACE}/{name}", lab.store_environment)
    if not await board.exists(name):
        await board.create(job)
    return Trial(name, board, watch)


async def hurt(lab: Lab, trial: Trial, slot: int, xid: int) -> Pod:
    """Break the GPU that the slot's pod holds; return that pod."""
    pod = await trial.board.current_pod(trial.name, slot)
    assert pod is not None
    faults.break_gpu(lab, pod, xid, NAMESPACE)
    return pod


async def until_quarantined(trial: Trial, node: str) -> dict:
    async def marked() -> bool:
        return (await trial.board.nodes())[node].cordoned

    await trial.until(f"{node} cordoned and tainted", marked, limit=30)
    found = [q for q in await trial.board.quarantines() if q["spec"]["nodeName"] == node]
    assert len(found) == 1
    return found[0]


async def test_a_failing_gpu_that_still_computes_is_left_after_a_commit(
    lab: Lab, trial: Trial
) -> None:
    await trial.until_stepping()
    pod = await hurt(lab, trial, slot=1, xid=64)
    quarantine = await until_quarantined(trial, pod.node)
    assert quarantine["spec"]["verdict"] == "Leaving"
    await trial.until_replaced(pod)
    assert await trial.steps_lost() == 0
    assert pod.node not in await trial.nodes()
    incident = (await trial.job())["status"]["incidents"][-1]
    assert incident["id"] == quarantine["spec"]["incident"]
    assert {m["name"] for m in incident["marks"]} >= {"verdict", "left"}


async def test_a_gpu_that_fell_off_the_bus_costs_no_step(lab: Lab, trial: Trial) -> None:
    await trial.until_stepping()
    before = {i["id"] for i in await trial.incidents()}
    restarts = (await trial.job())["status"]["restarts"]["total"]
    pod = await hurt(lab, trial, slot=0, xid=79)
    quarantine = await until_quarantined(trial, pod.node)
    assert quarantine["spec"]["verdict"] == "Gone"
    await trial.until_replaced(pod)
    assert await trial.steps_lost() == 0
    assert pod.node not in await trial.nodes()
    status = (await trial.job())["status"]
    assert status["restarts"]["total"] == restarts + 1, (
        "the death and the move must count as one fault"
    )
    # On a busy machine a slow rank may be taken for a hung one. That is a separate incident.
    cut_out = ("NoProgress", "GroupStuck")
    new = [i for i in status["incidents"] if i["id"] not in before and i["cause"] not in cut_out]
    assert {i.get("quarantine") for i in new} == {quarantine["spec"]["incident"]}, new
    assert {i["slot"] for i in new} == {0}, new
    assert {p["name"] for p in new[0]["phases"]} >= {"detect", "regroup", "first_step"}, new
    assert new[0]["rung"] == "regroup", new
    await trial.watch.refresh()
    ids = {new[0]["id"], new[0].get("jobId")}
    assert ids & trial.watch.incidents, "the run log has another incident id"


async def test_the_job_finishes_and_its_ledger_has_no_gap(lab: Lab, trial: Trial) -> None:
    complete = await trial.until_condition("Complete", limit=120)
    assert str(STEPS) in complete["message"]
    job = await trial.job()
    running = condition(job, "Running")
    assert running is None or running["status"] == "False"
    entries = await trial.watch.ledger()
    assert [e.step for e in entries] == list(range(1, STEPS + 1))
    assert all(count == 1 for e in entries for count in e.counts)


async def test_a_released_node_is_not_taken_again_for_the_same_evidence(
    lab: Lab, trial: Trial
) -> None:
    quarantines = await trial.board.quarantines()
    assert quarantines
    node = quarantines[0]["spec"]["nodeName"]
    for quarantine in quarantines:
        await trial.board.release(quarantine["metadata"]["name"])

    async def free() -> bool:
        return not (await trial.board.nodes())[node].cordoned

    await trial.until(f"{node} released", free, limit=20)
    for quarantine in quarantines:
        lab.heal(quarantine["spec"]["nodeName"])
    assert await trial.board.quarantines() == []

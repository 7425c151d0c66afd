"""One endless job under many faults; each test continues where the previous one ended."""

import asyncio

import pytest

from everstep_demo.board import Board, condition
from everstep_demo.runwatch import RunWatch
from everstep_demo.trial import NAMESPACE, URI, Trial, build_job
from everstep_lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(240)]
NAME = "survivor"


@pytest.fixture
async def trial(lab: Lab, board: Board) -> Trial:
    watch = RunWatch(URI, f"{NAMESPACE}/{NAME}", lab.store_environment)
    if not await board.exists(NAME):
        await board.create(build_job(NAME))
    return Trial(NAME, board, watch)


async def until_further(trial: Trial, step: int, *, limit: float = 60.0) -> None:
    async def further() -> bool:
        return await trial.step() > step

    await trial.until(f"a step after {step}", further, limit=limit)


async def test_a_deleted_pod_saves_first_and_comes_back(trial: Trial) -> None:
    epoch = await trial.until_stepping()
    pod = await trial.board.current_pod(NAME, 1)
    assert pod is not None
    await trial.board.delete_pod(pod.name)
    await trial.until_recovered(epoch)
    back = await trial.board.current_pod(NAME, 1)
    assert back is not None
    assert back.attempt == pod.attempt + 1
    assert await trial.steps_lost() == 0


async def test_the_operator_may_die_in_the_middle_of_a_recovery(lab: Lab, trial: Trial) -> None:
    epoch = await trial.until_stepping()
    pod = await trial.board.current_pod(NAME, 0)
    assert pod is not None
    await trial.board.delete_pod(pod.name)

    async def began() -> bool:
        newest = await trial.board.current_pod(NAME, 0)
        return newest is None or newest.attempt > pod.attempt or newest.deleting

    await trial.until("the recovery to begin", began, limit=30)
    lab.operator_kill()
    await asyncio.sleep(1.0)
    lab.operator_start()
    await trial.until_recovered(epoch)
    back = await trial.board.current_pod(NAME, 0)
    assert back is not None
    assert back.attempt == pod.attempt + 1, "a restarted operator must not count an attempt twice"
    await until_counted(trial)


async def until_counted(trial: Trial) -> None:
    """Wait until each interruption so far is over, and check that the totals count it once."""

    async def counted() -> bool:
        entries = (await trial.job())["status"]["incidents"]
        return all("recoverySeconds" in i for i in entries)

    await trial.until("all recoveries to be counted", counted, limit=30)
    status = (await trial.job())["status"]
    assert sum(t["count"] for t in status["recoveries"]) == len(status["incidents"]) >= 2
    assert status["seconds"]["step"] > 0


async def test_training_needs_no_operator(lab: Lab, trial: Trial) -> None:
    epoch = await trial.until_stepping()
    lab.operator_kill()
    await trial.watch.refresh()
    committed = trial.watch.committed

    async def commits() -> bool:
        await trial.watch.refresh()
        return trial.watch.committed > committed

    await trial.until("a commit without an operator", commits, limit=40)
    lab.operator_start()
    assert await trial.until_stepping() == epoch


async def test_twenty_seconds_without_the_object_store_cost_nothing(lab: Lab, trial: Trial) -> None:
    epoch = await trial.until_stepping()
    step = await trial.step()
    lab.objectstore_stop()
    try:
        await asyncio.sleep(20.0)
        await until_further(trial, step, limit=20)
        health = condition(await trial.job(), "CheckpointHealthy")
    finally:
        lab.objectstore_start()
    assert health is not None
    assert health["status"] == "False", health
    committed = trial.watch.committed

    async def mended() -> bool:
        await trial.watch.refresh()
        now = condition(await trial.job(), "CheckpointHealthy")
        return trial.watch.committed > committed and now is not None and now["status"] == "True"

    await trial.until("commits again", mended, limit=60)
    assert trial.watch.epoch == epoch


async def test_nobody_is_evicted_because_an_exporter_is_silent(lab: Lab, trial: Trial) -> None:
    epoch = await trial.until_stepping()
    pod = await trial.board.current_pod(NAME, 0)
    assert pod is not None
    lab.fault(pod.node, exporter="silent")
    try:
        await asyncio.sleep(10.0)
        await until_further(trial, await trial.step())
        assert not (await trial.board.nodes())[pod.node].cordoned
        assert await trial.board.current_pod(NAME, 0) == pod
    finally:
        lab.heal(pod.node)
    assert await trial.until_stepping() == epoch


async def test_nobody_is_replaced_if_the_api_server_loses_all_nodes(lab: Lab, trial: Trial) -> None:
    epoch = await trial.until_stepping()
    pods = await trial.board.pods(NAME)
    nodes = await trial.board.nodes()

    async def all_away() -> bool:
        return not any(node.ready for node in (await trial.board.nodes()).values())

    for name in nodes:
        lab.fault(name, partition=True)
    try:
        await trial.until("all nodes to be not Ready", all_away)
        await asyncio.sleep(10.0)  # nodeLostSeconds is 5; then a slot saves and leaves
        await until_further(trial, await trial.step())
        assert await trial.board.pods(NAME) == pods
        assert (await trial.job())["status"]["epoch"] == epoch
    finally:
        for name in nodes:
            lab.heal(name)
    await trial.until_stepping()


async def test_a_killed_node_costs_no_step(lab: Lab, trial: Trial) -> None:
    epoch = await trial.until_stepping()
    pod = await trial.board.current_pod(NAME, 1)
    assert pod is not None
    before = {i["id"] for i in await trial.incidents()}
    await trial.watch.refresh()
    claimed = set(trial.watch.incidents)
    lab.fault(pod.node, kill_node=True)
    try:
        await trial.until_recovered(epoch, limit=120)
    finally:
        lab.heal(pod.node)
    new = [i for i in await trial.incidents() if i["id"] not in before]
    assert [(i["cause"], i["slot"], i["stepsLost"]) for i in new] == [("NodeLost", 1, 0)], new
    await trial.watch.refresh()
    assert set(trial.watch.incidents) > claimed, (
        "the job must claim an epoch before the operator knows of the loss"
    )
    back = await trial.board.current_pod(NAME, 1)
    assert back is not None
    assert back.node != pod.node
    assert await trial.steps_lost() == 0


async def test_after_all_this_every_sample_was_used_once(trial: Trial) -> None:
    await trial.until_stepping()
    entries = await trial.watch.ledger()
    assert [e.step for e in entries] == list(range(1, len(entries) + 1))
    assert all(count == 1 for e in entries for count in e.counts)
    assert len(entries) > 100
    await trial.board.delete(NAME)

    async def over() -> bool:
        return not await trial.board.pods(NAME)

    async with asyncio.timeout(40):
        while not await over():
            await asyncio.sleep(0.2)

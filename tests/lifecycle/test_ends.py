"""A job ends by its deadline, by its TTL, or while a node dies at the last moment."""

import asyncio
import time

import pytest

from everstep_demo.board import is_true
from lifecycle.scene import LIMIT, Scene, until

pytestmark = [pytest.mark.lab, pytest.mark.long, pytest.mark.timeout(900)]


async def test_a_finished_job_and_its_pods_go_after_their_time(scene: Scene) -> None:
    await scene.start("brief", until=5, spec={"ttlSecondsAfterFinished": 2})
    await scene.nothing_left("brief")


async def test_a_deadline_fails_the_job_and_time_spent_suspended_is_not_counted(
    scene: Scene,
) -> None:
    began = time.monotonic()
    limit = 20
    spec = {"activeDeadlineSeconds": limit, "suspend": True}
    trial = await scene.start("late", replicas=1, spec=spec)
    await scene.condition(trial, "Suspended")
    await asyncio.sleep(max(0.0, limit + 3 - (time.monotonic() - began)))
    assert not is_true(await trial.job(), "Failed")
    await scene.board.patch("late", {"spec": {"suspend": False}})
    failed = await scene.condition(trial, "Failed")
    assert failed["reason"] == "DeadlineExceeded"
    assert "activeDeadlineSeconds" in failed["message"]
    assert (await trial.job())["status"]["suspendedSeconds"] >= limit

    async def over() -> bool:
        return all(p.phase in ("Succeeded", "Failed") for p in await scene.board.pods("late"))

    await until("its pods end", over)


async def test_a_node_that_dies_between_done_and_the_last_exit_takes_nothing_back(
    scene: Scene,
) -> None:
    trial = await scene.start("finishing", until=60, step_ms=20)

    async def bound() -> str:
        pod = await scene.board.current_pod("finishing", 1)
        return pod.node if pod else ""

    await trial.until("slot 1 has a node", bound, limit=LIMIT)
    node = await bound()

    async def done() -> bool:
        await trial.watch.refresh()
        return trial.watch.done

    await trial.until("done in the run log", done, limit=LIMIT)
    scene.lab.fault(node, kill_node=True)
    await scene.condition(trial, "Complete")
    await asyncio.sleep(15.0)  # longer than it takes to give up a node
    job = await trial.job()
    assert is_true(job, "Complete")
    assert not is_true(job, "Failed")
    assert await scene.attempts("finishing") == [1, 1], "a pod was created after the end"

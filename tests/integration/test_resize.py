"""`kubectl scale` up and down during a run: several pods join at once and leave at once, and the other
workers continue.
"""

import asyncio

import pytest

from everstep_demo.board import Board
from everstep_demo.runwatch import RunWatch
from everstep_demo.trial import NAMESPACE, URI, Trial, build_job
from everstep_lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(300)]
NAME = "scaled"


async def until_size(trial: Trial, size: int) -> None:
    async def is_so() -> bool:
        status = (await trial.job()).get("status", {})
        return (status.get("world") or {}).get("summary") == f"{size}/{size}"

    await trial.until(f"{size} of {size} members", is_so, limit=120)
    await trial.until_stepping()


def list_workers(lab: Lab, pod: str) -> list[str]:
    """Return the agent's log line for each worker that began to train in the pod."""
    said = lab.kubectl("-n", NAMESPACE, "logs", pod)
    return [line for line in said.splitlines() if "event=worker_runs" in line]


async def test_a_job_grows_and_shrinks_by_two_pods_and_nobody_restarts(
    lab: Lab, board: Board
) -> None:
    trial = Trial(NAME, board, RunWatch(URI, f"{NAMESPACE}/{NAME}", lab.store_environment))
    job = build_job(NAME, env={"TINY_STEPS": "100000"})
    job["spec"]["workers"] |= {"replicas": 2, "minReplicas": 1, "maxReplicas": 4}
    await board.create(job)
    try:
        await until_size(trial, 2)
        for size in (4, 2):
            await asyncio.to_thread(
                lab.kubectl, "-n", NAMESPACE, "scale", "rtj", NAME, f"--replicas={size}"
            )
            await until_size(trial, size)
        assert await trial.steps_lost() == 0
        status = (await trial.job())["status"]
        assert status["restarts"]["total"] == 0, f"a change of size is no interruption: {status}"
        for slot in (0, 1):
            pod = await board.current_pod(NAME, slot)
            assert pod is not None
            assert len(list_workers(lab, pod.name)) == 1, "a worker restarted"
    finally:
        await board.delete(NAME)

"""A job with a spare on the lab loses a node, or another job needs the spare's room."""

import time

import pytest

from everstep_demo.trial import Trial
from lifecycle.scene import LIMIT, Scene

pytestmark = [pytest.mark.lab, pytest.mark.long, pytest.mark.timeout(900)]
SOON = {"recovery": {"nodeLostSeconds": 5, "gangSeconds": 600}}


async def test_a_spare_takes_the_place_of_a_lost_node_and_the_slot_becomes_the_spare(
    scene: Scene,
) -> None:
    trial = await scene.start("warm", replicas=2, workers={"spares": 1}, spec=SOON)
    await scene.stepping(trial)
    await trial.until("a spare", lambda: _has_spares(trial, 1), limit=LIMIT)
    spare = (await trial.job())["status"]["spares"]["slots"][0]
    victim = next(s for s in range(3) if s != spare)
    began = time.monotonic()
    scene.lab.fault(await scene.node_of(trial, victim), kill_node=True)
    await trial.until("the spare trains", lambda: _trains(trial, victim), limit=LIMIT)
    print(f"the spare trains {time.monotonic() - began:.1f} s after the node lost its power")
    await scene.further(trial)
    await trial.until("the next spare", lambda: _has_spares(trial, 1), limit=LIMIT)
    status = (await trial.job())["status"]
    assert status["spares"]["slots"] == [victim]
    assert status["world"]["summary"] == "2/2"
    assert await trial.steps_lost() == 0
    assert status["restarts"]["total"] == 1, await trial.explain()


async def test_a_spare_makes_room_for_another_job_and_returns_when_there_is_room(
    scene: Scene,
) -> None:
    holder = await scene.start("holder", replicas=2, workers={"spares": 1}, spec=SOON)
    await scene.stepping(holder)
    await holder.until("a spare", lambda: _has_spares(holder, 1), limit=LIMIT)
    other = await scene.start("needs", replicas=2, spec=SOON)
    await scene.stepping(other)
    status = (await holder.job())["status"]
    assert (status["spares"].get("ready", 0), status["state"]) == (0, "Running")
    assert status["restarts"]["total"] == 0
    await scene.board.delete("needs")
    await holder.until("the spare again", lambda: _has_spares(holder, 1), limit=LIMIT)


async def _has_spares(trial: Trial, count: int) -> bool:
    spares = (await trial.job()).get("status", {}).get("spares") or {}
    return bool(spares.get("ready") == count)


async def _trains(trial: Trial, victim: int) -> bool:
    """Return whether the job has its full size without the slot."""
    status = (await trial.job()).get("status", {})
    whole = (status.get("world") or {}).get("summary") == "2/2" and status["state"] == "Running"
    attempts = {s["slot"]: s["attempt"] for s in status.get("slots", [])}
    return bool(whole and attempts.get(victim, 1) > 1)

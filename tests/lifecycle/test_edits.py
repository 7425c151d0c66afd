"""A running job is edited: it is applied, or refused with the reason."""

import pytest

from everstep_contract.log import Commit
from everstep_demo.board import is_true
from everstep_demo.trial import Trial
from everstep_lab.api import ApiError
from lifecycle.scene import LIMIT, Scene

pytestmark = [pytest.mark.lab, pytest.mark.long, pytest.mark.timeout(900)]


async def until_world(scene: Scene, trial: Trial, size: int) -> None:
    async def is_so() -> bool:
        status = (await trial.job()).get("status", {})
        return (status.get("world") or {}).get("summary") == f"{size}/{size}"

    await trial.until(f"{size} of {size} members", is_so, limit=LIMIT)


async def test_replicas_up_and_down_move_at_a_boundary_and_lose_nothing(scene: Scene) -> None:
    trial = await scene.start("sized", workers={"maxReplicas": 3, "minReplicas": 1})
    await scene.stepping(trial)
    await scene.board.patch("sized", {"spec": {"workers": {"replicas": 3}}})
    await until_world(scene, trial, 3)
    await scene.board.patch("sized", {"spec": {"workers": {"replicas": 1}}})
    await until_world(scene, trial, 1)
    await scene.further(trial)
    assert await trial.steps_lost() == 0

    async def only_slot_0() -> bool:
        return [p.slot for p in await scene.board.pods("sized")] == [0]

    await trial.until("the pods of slots 1 and 2 have ended", only_slot_0, limit=LIMIT)
    status = (await trial.job())["status"]
    assert status["restarts"]["total"] == 0, f"a wish is no interruption: {status}"


@pytest.mark.parametrize("replicas", [3, 1])
async def test_replicas_edited_in_the_middle_of_a_recovery(scene: Scene, replicas: int) -> None:
    name = f"resized-{replicas}"
    trial = await scene.start(name, workers={"maxReplicas": 3, "minReplicas": 1})
    await scene.stepping(trial)
    pod = await scene.board.current_pod(name, 1)
    assert pod is not None
    await scene.board.delete_pod(pod.name)

    async def recovers() -> bool:
        return is_true(await trial.job(), "Recovering")

    await trial.until("the recovery", recovers, limit=LIMIT)
    await scene.board.patch(name, {"spec": {"workers": {"replicas": replicas}}})
    await until_world(scene, trial, replicas)
    await scene.further(trial)
    assert await trial.steps_lost() == 0

    async def only_these() -> bool:
        return [p.slot for p in await scene.board.pods(name)] == list(range(replicas))

    await trial.until(f"pods of {replicas} slots and no more", only_these, limit=LIMIT)
    status = (await trial.job())["status"]
    assert status["restarts"]["total"] <= 1, f"one pod was deleted: {status}"


async def test_a_new_interval_counts_for_all_ranks_from_the_next_epoch_on(scene: Scene) -> None:
    """Slot 1 comes back with the new interval in its environment, slot 0 has the old one."""
    trial = await scene.start("interval")
    epoch = await scene.stepping(trial)
    await scene.board.patch("interval", {"spec": {"checkpoint": {"everySteps": 7}}})
    pod = await scene.board.current_pod("interval", 1)
    assert pod is not None
    await scene.board.delete_pod(pod.name)
    await trial.until_recovered(epoch, limit=LIMIT)
    seen: list[int] = []

    async def commits_by_seven() -> bool:
        entries = await trial.watch.refresh()
        seen.extend(e.step for e in entries if isinstance(e, Commit))
        return len([s for s in seen if s % 7 == 0]) >= 3

    await trial.until("three commits at multiples of 7", commits_by_seven, limit=LIMIT)


async def test_a_new_image_is_for_pods_made_from_then_on(scene: Scene) -> None:
    trial = await scene.start("image")
    epoch = await scene.stepping(trial)
    job = await trial.job()
    template = job["spec"]["workers"]["template"]
    template["spec"]["containers"][0]["env"].append({"name": "NEW", "value": "1"})
    await scene.board.patch("image", {"spec": {"workers": {"template": template}}})
    await scene.further(trial)
    assert await scene.attempts("image") == [1, 1], "nothing is rolled"
    pod = await scene.board.current_pod("image", 0)
    assert pod is not None
    await scene.board.delete_pod(pod.name)
    await trial.until_recovered(epoch, limit=LIMIT)
    made = await scene.api.get("/api/v1/namespaces/default/pods/image-0-2")
    assert {"name": "NEW", "value": "1"} in made["spec"]["containers"][0]["env"]


async def test_what_would_lose_the_runs_past_is_refused_with_the_way_out(scene: Scene) -> None:
    await scene.start("fixed", replicas=1, spec={"suspend": True})
    for change, words in (
        ({"uri": "s3://everstep/elsewhere"}, "make a new job for a new place"),
        ({"run": "another"}, "make a new job for a new run"),
    ):
        with pytest.raises(ApiError) as caught:
            await scene.board.patch("fixed", {"spec": {"checkpoint": change}})
        assert caught.value.status == 422
        assert words in caught.value.message
    with pytest.raises(ApiError) as caught:
        await scene.board.patch("fixed", {"spec": {"workers": {"minReplicas": 9}}})
    assert "lower minReplicas or raise replicas" in caught.value.message

"""Edits of a running job are applied, or refused with a reason."""

import asyncio
import json
from pathlib import Path

import pytest

from everstep_contract.log import Commit
from everstep_demo.board import is_true
from everstep_demo.trial import Trial
from everstep_lab.api import ApiError
from lifecycle.scene import LIMIT, Scene
from stub_image.given import build_stub_job

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
    assert status["restarts"]["total"] == 0, f"a change of size is no interruption: {status}"


@pytest.mark.parametrize("replicas", [3, 1])
async def test_replicas_edited_in_the_middle_of_a_recovery(scene: Scene, replicas: int) -> None:
    name = f"resized-{replicas}"
    trial = await scene.start(name, workers={"maxReplicas": 3, "minReplicas": 1})
    await scene.stepping(trial)
    pod = await scene.board.current_pod(name, 1)
    assert pod is not None
    await scene.board.delete_pod(pod.name)

    async def recovers() -> bool:
        job = await trial.job()
        counted = (job["status"].get("restarts") or {}).get("total") == 1
        return counted and is_true(job, "Recovering")

    # Wait for the count before the edit. If the edit removed the slot earlier, there would be no
    # interruption to count.
    await trial.until("a recovery that is counted", recovers, limit=LIMIT)
    await scene.board.patch(name, {"spec": {"workers": {"replicas": replicas}}})
    await until_world(scene, trial, replicas)
    await scene.further(trial)
    assert await trial.steps_lost() == 0

    async def only_these() -> bool:
        return [p.slot for p in await scene.board.pods(name)] == list(range(replicas))

    await trial.until(f"pods of {replicas} slots and no more", only_these, limit=LIMIT)
    status = (await trial.job())["status"]
    assert status["restarts"]["total"] == 1, (
        f"one deleted pod must count as one interruption: {status}"
    )
    assert status["restarts"]["byCause"] == {"PodDeleted": 1}


async def test_a_new_interval_counts_for_all_ranks_from_the_next_epoch_on(scene: Scene) -> None:
    """The edit ends the epoch at a checkpoint. After slot 1's pod is replaced, its environment has the
    new interval, while slot 0's still has the old one.
    """
    trial = await scene.start("interval")
    await scene.stepping(trial)
    await scene.board.patch("interval", {"spec": {"checkpoint": {"everySteps": 7}}})

    async def is_observed() -> bool:
        job = await trial.job()
        return bool(job["status"]["observedGeneration"] == job["metadata"]["generation"])

    await trial.until("the edit is acted on", is_observed, limit=LIMIT)
    status = (await trial.job())["status"]
    assert status["restarts"]["total"] == 0, f"an edit is no interruption: {status}"
    await _commits_by_seven(trial)
    epoch = await scene.stepping(trial)
    pod = await scene.board.current_pod("interval", 1)
    assert pod is not None
    await scene.board.delete_pod(pod.name)
    await trial.until_recovered(epoch, limit=LIMIT)
    await _commits_by_seven(trial)


async def _commits_by_seven(trial: Trial) -> None:
    """Wait for three more commits at multiples of 7."""
    seen: list[int] = []

    async def enough() -> bool:
        entries = await trial.watch.refresh()
        seen.extend(e.step for e in entries if isinstance(e, Commit))
        return len([s for s in seen if s % 7 == 0]) >= 3

    await trial.until("three commits at multiples of 7", enough, limit=LIMIT)


async def test_a_shorter_hang_limit_reaches_a_job_that_runs(scene: Scene) -> None:
    trial = await scene.start("limits")
    await scene.stepping(trial)
    await scene.board.patch("limits", {"spec": {"recovery": {"hangSeconds": 77}}})

    async def is_observed() -> bool:
        job = await trial.job()
        return bool(job["status"]["observedGeneration"] == job["metadata"]["generation"])

    await trial.until("the edit is acted on", is_observed, limit=LIMIT)
    assert await scene.attempts("limits") == [1, 1], "the edit must create no pod"


async def test_a_new_image_is_for_pods_made_from_then_on(scene: Scene) -> None:
    trial = await scene.start("image")
    epoch = await scene.stepping(trial)
    job = await trial.job()
    template = job["spec"]["workers"]["template"]
    template["spec"]["containers"][0]["env"].append({"name": "NEW", "value": "1"})
    await scene.board.patch("image", {"spec": {"workers": {"template": template}}})
    await scene.further(trial)
    assert await scene.attempts("image") == [1, 1], "the edit must replace no pod"
    pod = await scene.board.current_pod("image", 0)
    assert pod is not None
    await scene.board.delete_pod(pod.name)
    await trial.until_recovered(epoch, limit=LIMIT)
    made = await scene.api.get("/api/v1/namespaces/default/pods/image-0-2")
    assert {"name": "NEW", "value": "1"} in made["spec"]["containers"][0]["env"]


async def test_what_would_lose_the_runs_past_is_refused_with_the_way_out(scene: Scene) -> None:
    await scene.start("fixed", replicas=1, spec={"suspend": True})
    for change, words in (
        ({"uri": "s3://everstep/elsewhere"}, "create a new job for another location"),
        ({"run": "another"}, "create a new job for another run"),
    ):
        with pytest.raises(ApiError) as caught:
            await scene.board.patch("fixed", {"spec": {"checkpoint": change}})
        assert caught.value.status == 422
        assert words in caught.value.message
    with pytest.raises(ApiError) as caught:
        await scene.board.patch("fixed", {"spec": {"workers": {"minReplicas": 9}}})
    assert "lower minReplicas or raise replicas" in caught.value.message


async def test_a_manifest_applied_again_and_again_through_a_recovery_changes_nothing(
    scene: Scene, tmp_path: Path
) -> None:
    """The manifest is applied as by Argo CD or Flux: server-side, under their own field manager,
    overriding what others have written.
    """
    manifest = tmp_path / "job.json"
    manifest.write_text(json.dumps(build_stub_job("gitops")))
    trial = await scene.apply(json.loads(manifest.read_text()))
    epoch = await scene.stepping(trial)

    async def apply() -> None:
        await asyncio.to_thread(
            scene.lab.kubectl, "apply", "--server-side", "--force-conflicts",
            "--field-manager=gitops", "-f", str(manifest),
        )  # fmt: skip

    await apply()
    settled = (await trial.job())["metadata"]["generation"]
    pod = await scene.board.current_pod("gitops", 1)
    assert pod is not None
    await scene.board.delete_pod(pod.name)
    recovery = asyncio.create_task(trial.until_recovered(epoch, limit=LIMIT))
    applied = 0
    while not recovery.done():
        await apply()
        applied += 1
    await recovery
    assert applied > 2, "the manifest was not applied during the recovery"
    job = await trial.job()
    assert job["metadata"]["generation"] == settled, "Everstep must not write the spec"
    assert job["status"]["restarts"]["byCause"] == {"PodDeleted": 1}
    assert await scene.attempts("gitops") == [1, 2]
    assert await trial.steps_lost() == 0

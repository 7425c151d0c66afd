"""Jobs lack nodes or quota, lose a pod to one of higher priority, or have pods deleted by others."""

import time

import pytest

from everstep_demo.board import is_true
from everstep_demo.trial import Trial
from everstep_operator.jobs.stamps import to_seconds
from lifecycle.scene import CORE, LIMIT, Scene, nodes_taken, until
from stub_image.given import build_stub_job

pytestmark = [pytest.mark.lab, pytest.mark.long, pytest.mark.timeout(900)]
GANG = {"recovery": {"nodeLostSeconds": 5, "gangSeconds": 4}}
PATIENT = {"recovery": {"nodeLostSeconds": 5, "gangSeconds": 600}}


async def test_of_two_jobs_with_room_for_one_the_younger_gives_its_pods_back_and_comes_later(
    scene: Scene,
) -> None:
    async with nodes_taken(scene, 2):
        first = await scene.start("first", replicas=3, spec=PATIENT)
        await until("two of its pods placed", lambda: _placed(scene, "first", 2))
        await until("a later second than that of its creation", lambda: _is_old(first))
        second = await scene.start("second", replicas=3, spec=GANG)
        await until("pods of the second", lambda: scene.board.pods("second"))
    await scene.stepping(first)
    message = await scene.told(second, "GangIncomplete")
    assert "of the 3 pods that the job needs" in message
    assert "creates all again at" in message
    await until("its pods given back", lambda: _no_pods(scene, "second"))
    assert (await first.job())["status"]["restarts"]["total"] == 0
    await scene.board.delete("first")
    await scene.stepping(second)
    status = (await second.job())["status"]
    assert status["restarts"]["total"] == 0
    assert "gang" not in status


async def _is_old(trial: Trial) -> bool:
    """Return whether a job created now would be younger. The creation times, in whole seconds, decide
    which of two jobs is older.
    """
    created = to_seconds((await trial.job())["metadata"]["creationTimestamp"])
    now = time.time()  # noqa: TID251 compared with the clock of the API server
    return created is not None and now > created + 1


async def _placed(scene: Scene, name: str, count: int) -> bool:
    return len([p for p in await scene.board.pods(name) if p.node]) >= count


async def _no_pods(scene: Scene, name: str) -> bool:
    return not await scene.board.pods(name)


async def test_a_job_shrinks_to_min_replicas_and_grows_when_a_node_returns(scene: Scene) -> None:
    trial = await scene.start("elastic", replicas=3, workers={"minReplicas": 2}, spec=GANG)
    await scene.stepping(trial)
    used = {await scene.node_of(trial, slot) for slot in range(3)}
    (spare,) = set(await scene.board.nodes()) - used
    await scene.cordon(spare)
    lost = await scene.node_of(trial, 2)
    scene.lab.fault(lost, kill_node=True)
    await trial.until("two of three members", lambda: _summary(trial, "2/3"), limit=LIMIT)
    await scene.further(trial)
    await scene.cordon(spare, on=False)
    await trial.until("three of three members", lambda: _summary(trial, "3/3"), limit=LIMIT)
    assert await trial.steps_lost() == 0


async def _summary(trial: object, words: str) -> bool:
    status = (await trial.job()).get("status", {})  # type: ignore[attr-defined]
    return bool((status.get("world") or {}).get("summary") == words)


async def test_a_quota_is_told_in_the_servers_words_and_the_job_starts_when_there_is_room(
    scene: Scene,
) -> None:
    quota = {"metadata": {"name": "tight"}, "spec": {"hard": {"count/pods": "1"}}}
    path = f"{CORE}/resourcequotas"
    await scene.create(path, {"apiVersion": "v1", "kind": "ResourceQuota", **quota})
    trial = await scene.start("tight", spec=GANG)
    message = await scene.told(trial, "GangIncomplete")
    assert "exceeded quota: tight" in message
    await scene.api.patch(f"{path}/tight", {"spec": {"hard": {"count/pods": "9"}}})
    await scene.stepping(trial)


async def test_a_pod_of_higher_priority_takes_a_node_after_a_save(scene: Scene) -> None:
    classes = "/apis/scheduling.k8s.io/v1/priorityclasses"
    urgent = {"metadata": {"name": "urgent"}, "value": 1000}
    await scene.create(
        classes, {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", **urgent}
    )
    low = await scene.start("low", replicas=4, workers={"minReplicas": 2}, spec=GANG)
    await scene.stepping(low)
    high = build_stub_job("high", replicas=1)
    high["spec"]["workers"]["template"]["spec"]["priorityClassName"] = "urgent"
    await scene.stepping(await scene.apply(high))
    await low.until("three of four members", lambda: _summary(low, "3/4"), limit=LIMIT)
    assert await low.steps_lost() == 0
    incident = (await low.incidents())[-1]
    assert incident["cause"] == "PodDeleted", incident


async def test_a_cordon_by_hand_is_respected_and_a_drain_saves_first(scene: Scene) -> None:
    trial = await scene.start("drained")
    epoch = await scene.stepping(trial)
    node = await scene.node_of(trial, 1)
    await scene.cordon(node)
    await scene.further(trial)
    assert await scene.node_of(trial, 1) == node, "a cordon must move no pod"
    scene.lab.kubectl(
        "drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--force",
        "--timeout=200s", timeout=240,
    )  # fmt: skip
    await trial.until_recovered(epoch, limit=LIMIT)
    assert await scene.node_of(trial, 1) != node
    assert await trial.steps_lost() == 0
    assert await scene.is_cordoned(node), "Everstep must not lift a cordon of others"
    await scene.cordon(node, on=False)


async def test_a_pod_deleted_by_force_is_replaced_once_though_its_gpu_is_not_free_at_once(
    scene: Scene,
) -> None:
    trial = await scene.start("forced", replicas=4)
    epoch = await scene.stepping(trial)
    await scene.api.delete(f"{CORE}/pods/forced-2-1", grace=0)
    await trial.until_recovered(epoch, limit=LIMIT)
    job = await trial.job()
    assert is_true(job, "Running")
    assert not is_true(job, "Failed")
    status = job["status"]
    assert [i["cause"] for i in status["incidents"]] == ["PodDeleted"], await trial.explain()
    # If the node refuses the pod because the GPU is still in use, that costs an attempt, but no restart.
    assert status["slots"][2].get("cause") in ("PodDeleted", "Rescheduled"), status["slots"]
    assert status["restarts"]["byCause"] == {"PodDeleted": 1}, await trial.explain()
    assert status["restarts"]["total"] == 1

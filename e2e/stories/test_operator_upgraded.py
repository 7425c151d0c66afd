"""`helm upgrade` while a job runs: the pods are not touched, the epoch stays, steps go on."""

import asyncio
import json

import pytest

from everstep_demo.trial import Trial
from everstep_stories.clusters import NotHereError
from everstep_stories.scene import Scene
from everstep_stories.system import CHART, NAMESPACE, RELEASE

pytestmark = pytest.mark.timeout(400)


def secrets(scene: Scene) -> dict[str, dict]:
    text = scene.cluster.kubectl("get", "secrets", "-n", NAMESPACE, "-o", "json")
    return {s["metadata"]["name"]: s.get("data") for s in json.loads(text)["items"]}


async def test_an_upgrade_does_not_disturb_a_running_job(scene: Scene, survivor: Trial) -> None:
    if not scene.system.by_helm:
        raise NotHereError("the local lab runs the operator without Helm")
    epoch = await survivor.until_stepping()
    pods = await scene.board.pods(survivor.name)
    operators = {p["metadata"]["name"] for p in scene.system.pods()}
    key = {n: d for n, d in secrets(scene).items() if not n.startswith("sh.helm")}
    with scene.timed("helm upgrade"):
        await asyncio.to_thread(
            scene.system.helm, "upgrade", RELEASE, str(CHART), "-n", NAMESPACE, "--reuse-values",
            "--set=logLevel=DEBUG", "--wait", "--timeout=180s",
        )  # fmt: skip
    await scene.system.until_leader()
    renewed = {p["metadata"]["name"] for p in scene.system.pods()}
    assert not operators & renewed, "every replica must be new"
    await scene.until_further(survivor, 20)
    assert await survivor.until_stepping() == epoch
    assert await scene.board.pods(survivor.name) == pods
    assert {n: d for n, d in secrets(scene).items() if not n.startswith("sh.helm")} == key
    scene.teller.outcome.steps_lost = 0
    with scene.timed("helm rollback"):
        await asyncio.to_thread(
            scene.system.helm, "rollback", RELEASE, "-n", NAMESPACE, "--wait", "--timeout=180s"
        )
    await scene.system.until_leader()
    await scene.until_further(survivor, 20)
    assert await scene.board.pods(survivor.name) == pods
    await scene.check_samples(survivor)

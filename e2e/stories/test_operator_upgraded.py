"""`helm upgrade` while a job runs, from an operator with the previous protocol and without recovery
in place: the pods and the epoch stay the same, steps continue, and the key is kept. Under either
operator a deleted pod is replaced and no step is lost.
"""

import asyncio
import json
import shutil
import subprocess

import pytest

from everstep_contract import PROTOCOL
from everstep_demo.board import Pod
from everstep_demo.trial import Trial
from everstep_stories.clusters import NotHereError
from everstep_stories.scene import Scene
from everstep_stories.system import APP_VERSION, CHART, NAMESPACE, RELEASE

pytestmark = pytest.mark.timeout(400)
CURRENT, FORMER = f"everstep/operator:{APP_VERSION}", "everstep/operator:former"
# There is no earlier release, so a copy of this one takes its place. Its protocol number is lower
# by one, and it sends the agents nothing about recovery in place.
NEWER = r"in_place=|on_loss=|below_min_seconds="
DOCKERFILE = f"""
FROM {CURRENT}
USER root
RUN f=$(python -c 'import everstep_contract as c; print(c.__file__)') \\
 && sed -i 's/^PROTOCOL = {PROTOCOL}$/PROTOCOL = {PROTOCOL - 1}/' "$f" \\
 && python -c 'import everstep_contract as c; assert c.PROTOCOL == {PROTOCOL - 1}'
RUN f=$(python -c 'import everstep_operator.jobs as j; print(j.__path__[0])') \\
 && sed -i -E '/^ +({NEWER})/d' "$f"/wanted.py "$f"/manifests.py \\
 && ! grep -E '{NEWER}' "$f"/wanted.py "$f"/manifests.py
USER 65532:65532
"""


def keys(scene: Scene) -> dict[str, dict]:
    """Every Secret of the release except Helm's own."""
    text = scene.cluster.kubectl("get", "secrets", "-n", NAMESPACE, "-o", "json")
    found = {s["metadata"]["name"]: s.get("data") for s in json.loads(text)["items"]}
    return {name: value for name, value in found.items() if not name.startswith("sh.helm")}


async def upgrade(scene: Scene, *settings: str) -> None:
    await asyncio.to_thread(
        scene.system.helm, "upgrade", RELEASE, str(CHART), "-n", NAMESPACE, "--reuse-values",
        *settings, "--wait", "--timeout=180s",
    )  # fmt: skip
    await scene.system.until_leader()


def make_former(scene: Scene) -> None:
    load = getattr(scene.cluster, "load_image", None)
    if load is None or shutil.which("docker") is None:
        raise NotHereError("docker is needed to build the former operator's image")
    subprocess.run(
        ["docker", "build", "--tag", FORMER, "-"], input=DOCKERFILE, text=True, check=True,
        capture_output=True, timeout=120,
    )  # fmt: skip
    load(FORMER)


async def delete_a_pod(scene: Scene, survivor: Trial) -> None:

    async def delete(pod: Pod) -> None:
        await scene.kubectl("delete", "pod", pod.name, "--wait=false")

    slot = (await scene.board.pods(survivor.name))[-1].slot
    await scene.play(survivor, "kubectl delete pod", delete, slot=slot)
    assert scene.recorder.outcome.steps_lost == 0
    assert (await survivor.incidents())[-1]["cause"] == "PodDeleted"


async def test_an_upgrade_does_not_disturb_a_running_job(scene: Scene, survivor: Trial) -> None:
    if not scene.system.by_helm:
        raise NotHereError("the local lab runs the operator without Helm")
    with scene.timed("former image built and loaded"):
        await asyncio.to_thread(make_former, scene)
    with scene.timed("helm upgrade to the former"):
        await upgrade(scene, "--set=image.tag=former")
    await delete_a_pod(scene, survivor)
    epoch = await survivor.until_stepping()
    await scene.until_further(survivor, 20)
    pods = await scene.board.pods(survivor.name)
    operators = {p["metadata"]["name"] for p in scene.system.pods()}
    key = keys(scene)
    with scene.timed("helm upgrade to the current"):
        await upgrade(scene, "--set=image.tag=")
    renewed = scene.system.pods()
    assert not operators & {p["metadata"]["name"] for p in renewed}, "every replica must be new"
    assert {p["spec"]["containers"][0]["image"] for p in renewed} == {CURRENT}
    await scene.until_further(survivor, 20)
    assert await survivor.until_stepping() == epoch
    assert await scene.board.pods(survivor.name) == pods
    assert keys(scene) == key
    await delete_a_pod(scene, survivor)
    await scene.check_samples(survivor)

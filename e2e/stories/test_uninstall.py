"""`helm uninstall` with a node in quarantine and a job running: no node cordoned, nothing stuck."""

import asyncio
import json
import time

import pytest

from everstep_contract import names
from everstep_demo.trial import POLL_SECONDS
from everstep_stories.clusters import NotHereError
from everstep_stories.scene import Scene
from everstep_stories.system import NAMESPACE, RELEASE

pytestmark = pytest.mark.timeout(400)

MEMORY = {names.ANNOTATION_ANSWERED, names.ANNOTATION_EXPECTED_GPUS}
"""Annotations that stay for a later installation; they have no effect of their own (see the chart's README)."""


async def test_uninstalling_leaves_no_cordon_and_nothing_that_cannot_be_deleted(
    scene: Scene,
) -> None:
    if not scene.system.by_helm:
        raise NotHereError("the local lab runs the operator without Helm")
    trial = await scene.start(scene.build_job("orphan"))
    await trial.until_stepping(limit=180)
    pod = await scene.board.current_pod("orphan", 1)
    assert pod is not None
    await scene.break_gpu(pod, 64)

    async def marked() -> bool:
        return (await scene.board.nodes())[pod.node].cordoned

    await trial.until(f"{pod.node} cordoned", marked, limit=60)
    with scene.timed("helm uninstall"):
        await asyncio.to_thread(
            scene.system.helm, "uninstall", RELEASE, "-n", NAMESPACE, "--wait", "--timeout=120s"
        )
    nodes = json.loads(scene.cluster.kubectl("get", "nodes", "-o", "json"))["items"]
    for node in nodes:
        assert not node["spec"].get("unschedulable"), node["metadata"]["name"]
        taints = [t["key"] for t in node["spec"].get("taints", [])]
        assert not [t for t in taints if "everstep" in t]
        ours = {a for a in node["metadata"].get("annotations", {}) if "everstep.dev" in a}
        assert ours <= MEMORY, ours
    crds = "customresourcedefinitions"
    kept = scene.cluster.kubectl("get", crds, "-o", "name")
    assert "everstep.dev" in kept, "crds.keep: jobs must outlive an uninstall"
    with scene.timed("job deleted without an operator"):
        await scene.kubectl("delete", "rtj", "--all", "--timeout=60s")
    with scene.timed("all objects of the release deleted"):
        left = await _until_little_is_left(scene, seconds=60)
    assert not left, left


async def _until_little_is_left(scene: Scene, seconds: float) -> list[str]:
    """The release's objects that remain. Helm waits for the Deployment's deletion, not for its pods
    to end.
    """
    end = time.monotonic() + seconds
    while True:
        found = await scene.kubectl(
            "get", "clusterroles,clusterrolebindings,validatingadmissionpolicies,"
            "validatingadmissionpolicybindings,priorityclasses,deployments,jobs,leases,pods",
            "-A", "-o", "name", "-l", f"app.kubernetes.io/instance={RELEASE}",
        )  # fmt: skip
        if not found.split() or time.monotonic() > end:
            return found.split()
        await asyncio.sleep(POLL_SECONDS)

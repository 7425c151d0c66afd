"""Install with Helm: the release is ready, the CRDs are served, one replica leads, `helm test` passes."""

import asyncio
import json

import pytest

from everstep_lab.api import ApiError
from everstep_stories.clusters import Cluster, NotHereError
from everstep_stories.figures import Recorder
from everstep_stories.scene import Scene
from everstep_stories.system import NAMESPACE, RELEASE, System

pytestmark = pytest.mark.timeout(600)


async def test_helm_installs_it_and_its_own_test_passes(
    cluster: Cluster, bare_system: System, recorder: Recorder
) -> None:
    if not bare_system.by_helm:
        raise NotHereError("the local lab runs the operator without Helm")
    recorder.phase("helm install", await asyncio.to_thread(bare_system.install), "ready")
    pods = bare_system.pods()
    assert len(pods) == 2
    assert all(_is_ready(pod) for pod in pods)
    leader, took = await bare_system.until_leader()
    recorder.phase("leader", took, leader)
    assert leader in {pod["metadata"]["name"] for pod in pods}
    crds = json.loads(cluster.kubectl("get", "crd", "-o", "json"))["items"]
    ours = {c["metadata"]["name"] for c in crds if c["spec"]["group"] == "everstep.dev"}
    assert ours == {"resilienttrainingjobs.everstep.dev", "nodequarantines.everstep.dev"}
    said = await asyncio.to_thread(bare_system.helm, "test", RELEASE, "-n", NAMESPACE)
    assert "Succeeded" in said


async def test_an_invalid_job_is_refused_with_the_fix(scene: Scene) -> None:
    job = scene.build_job("senseless", spec={"checkpoint": {"uri": "ftp://host/x"}})
    with pytest.raises(ApiError) as refused:
        await scene.board.create(job)
    assert refused.value.status == 422
    assert "s3://" in refused.value.message


def _is_ready(pod: dict) -> bool:
    conditions = pod["status"].get("conditions", [])
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)

"""Forbidden requests are denied, with the operator's own tokens and with that of an unrelated ServiceAccount."""

import base64
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path

import pytest

from everstep_contract import names
from everstep_demo.board import API
from everstep_lab.api import Api, ApiError
from everstep_stories.clusters import NotHereError
from everstep_stories.scene import Scene
from everstep_stories.system import NAMESPACE

pytestmark = pytest.mark.timeout(300)
OPERATOR, NODES = "everstep-operator", "everstep-nodes"
RBAC = "/apis/rbac.authorization.k8s.io/v1"


@contextlib.asynccontextmanager
async def acting_as(
    scene: Scene, account: str, folder: Path, *, namespace: str = NAMESPACE
) -> AsyncIterator[Api]:
    """An API client whose only credential is the ServiceAccount's token."""
    token = scene.cluster.kubectl("create", "token", account, "-n", namespace).strip()
    view = json.loads(scene.cluster.kubectl("config", "view", "--raw", "--minify", "-o", "json"))[
        "clusters"
    ][0]["cluster"]
    ca = folder / "ca.crt"
    ca.write_bytes(base64.b64decode(view["certificate-authority-data"]))
    async with Api(view["server"], token=token, ca=ca) as api:
        yield api


async def is_denied(scene: Scene, attempt: Awaitable[object], *words: str) -> None:
    """Check that the request is refused by RBAC or a policy, and for no other reason."""
    with pytest.raises(ApiError) as refused:
        await attempt
    assert refused.value.status == 403, refused.value
    assert all(word in refused.value.message for word in words), refused.value
    scene.recorder.say("denied", refused.value.message[:150])


@pytest.fixture
def node(scene: Scene) -> str:
    if not scene.system.by_helm:
        raise NotHereError("the rights are those of the Helm release")
    found = json.loads(scene.cluster.kubectl("get", "nodes", "-o", "json"))["items"]
    workers = [n for n in found if "nvidia.com/gpu" in n["status"]["allocatable"]]
    return str(workers[0]["metadata"]["name"])


async def test_the_operator_reads_no_secret_and_touches_no_node(
    scene: Scene, node: str, tmp_path: Path
) -> None:
    core = f"/api/v1/namespaces/{scene.namespace}"
    binding = {"metadata": {"name": "x"}, "roleRef": {}, "subjects": []}
    label = {"metadata": {"labels": {"x": "y"}}}
    token = {"kind": "TokenRequest", "apiVersion": "authentication.k8s.io/v1", "spec": {}}
    async with acting_as(scene, OPERATOR, tmp_path) as operator:
        await is_denied(scene, operator.get(f"{core}/secrets"), "secrets")
        await is_denied(scene, operator.get(f"{core}/secrets/object-store"), "secrets")
        await is_denied(scene, operator.delete(f"{core}/secrets/object-store"), "secrets")
        await is_denied(scene, operator.get(f"{core}/configmaps"), "configmaps")
        await is_denied(scene, operator.create(f"{core}/serviceaccounts/default/token", token))
        await is_denied(scene, operator.patch(f"/api/v1/nodes/{node}", label), "nodes")
        await is_denied(scene, operator.delete(f"/api/v1/nodes/{node}"), "nodes")
        await is_denied(scene, operator.create(f"{RBAC}/clusterrolebindings", binding))


async def test_the_fleet_may_cordon_and_mark_and_nothing_else_of_a_node(
    scene: Scene, node: str, tmp_path: Path
) -> None:
    path = f"/api/v1/nodes/{node}"
    mark = f"{names.GROUP}/test"
    async with acting_as(scene, NODES, tmp_path) as nodes:
        try:
            change = {"spec": {"unschedulable": True}, "metadata": {"annotations": {mark: "x"}}}
            await nodes.patch(path, change)
        finally:
            undo = {"spec": {"unschedulable": None}, "metadata": {"annotations": {mark: None}}}
            await scene.api.patch(path, undo)
        for foreign in (
            {"metadata": {"labels": {"x": "y"}}},
            {"metadata": {"annotations": {"cluster-autoscaler.kubernetes.io/x": "y"}}},
            {"spec": {"taints": [{"key": "other", "effect": "NoExecute"}]}},
        ):
            await is_denied(scene, nodes.patch(path, foreign))
        await is_denied(scene, nodes.delete(path), "nodes")
        await is_denied(scene, nodes.get("/api/v1/pods"), "pods")
        await is_denied(scene, nodes.get("/api/v1/secrets"), "secrets")


async def test_who_may_not_create_pods_may_not_have_a_job_create_them(
    scene: Scene, node: str, tmp_path: Path
) -> None:
    account = f"--serviceaccount={scene.namespace}:stranger"
    kind = f"--resource={names.PLURAL}.{names.GROUP}"
    await scene.kubectl("create", "serviceaccount", "stranger")
    try:
        await scene.kubectl("create", "role", "stranger", "--verb=create,get,update", kind)
        await scene.kubectl("create", "rolebinding", "stranger", "--role=stranger", account)
        jobs = f"{API}/namespaces/{scene.namespace}/{names.PLURAL}"
        async with acting_as(scene, "stranger", tmp_path, namespace=scene.namespace) as stranger:
            await is_denied(scene, stranger.create(jobs, scene.build_job("smuggled")), "pods")
    finally:
        for what in ("rolebinding", "role", "serviceaccount"):
            await scene.kubectl("delete", what, "stranger", "--ignore-not-found")

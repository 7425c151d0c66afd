"""What the operator may not do is tried with its own tokens, and what a stranger may not do with his."""

import asyncio
import json

import pytest

from everstep_contract import names
from everstep_lab.seam import LabError
from everstep_stories.clusters import NotHereError
from everstep_stories.scene import Scene
from everstep_stories.system import NAMESPACE

pytestmark = pytest.mark.timeout(300)
OPERATOR, NODES = "everstep-operator", "everstep-nodes"
DENIED = ("forbidden", "denied", "Forbidden")


class As:
    """kubectl with a service account's own token."""

    def __init__(self, scene: Scene, account: str, namespace: str = NAMESPACE) -> None:
        self._scene = scene
        self._token = scene.cluster.kubectl("create", "token", account, "-n", namespace).strip()

    def try_(self, *arguments: str, stdin: str | None = None) -> str:
        """Standard output; raises LabError with the API server's words."""
        # Certificates of the kubeconfig would win over the token: a config of its own.
        config = json.loads(
            self._scene.cluster.kubectl("config", "view", "--raw", "--minify", "-o", "json")
        )
        config["users"][0]["user"] = {"token": self._token}
        path = self._scene.cluster.kubeconfig.parent / f"as-{abs(hash(self._token))}.json"
        path.write_text(json.dumps(config))
        path.chmod(0o600)
        try:
            return self._scene.cluster.kubectl(f"--kubeconfig={path}", *arguments, stdin=stdin)
        finally:
            path.unlink()

    def is_denied(self, *arguments: str, stdin: str | None = None) -> str:
        """The words of the denial. Raises AssertionError if it was allowed."""
        with pytest.raises(LabError) as refused:
            self.try_(*arguments, stdin=stdin)
        said = str(refused.value)
        assert any(word in said for word in DENIED), said
        return said


def merge(change: object) -> tuple[str, ...]:
    return ("--type=merge", "-p", json.dumps(change))


@pytest.fixture
def node(scene: Scene) -> str:
    if not scene.system.by_helm:
        raise NotHereError("the rights are the chart's; the local lab does not render all of them")
    found = json.loads(scene.cluster.kubectl("get", "nodes", "-o", "json"))["items"]
    workers = [n for n in found if "nvidia.com/gpu" in n["status"]["allocatable"]]
    return str(workers[0]["metadata"]["name"])


async def test_the_operator_reads_no_secret_and_touches_no_node(scene: Scene, node: str) -> None:
    operator = As(scene, OPERATOR)
    inside = ("-n", scene.namespace)
    for forbidden in (
        ("get", "secrets", *inside),
        ("get", "secret", "object-store", *inside),
        ("delete", "secret", "object-store", *inside),
        ("create", "token", "default", *inside),
        ("delete", "node", node),
        ("patch", "node", node, *merge({"metadata": {"labels": {"x": "y"}}})),
        ("get", "configmaps", *inside),
        ("create", "clusterrolebinding", "x", "--clusterrole=cluster-admin", "--user=x"),
    ):
        said = await asyncio.to_thread(operator.is_denied, *forbidden)
        scene.teller.say("denied", said[-100:])


async def test_the_fleet_may_cordon_and_mark_and_nothing_else_of_a_node(
    scene: Scene, node: str
) -> None:
    nodes = As(scene, NODES)
    mine = {f"{names.GROUP}/test": "x"}
    try:
        await asyncio.to_thread(
            nodes.try_, "patch", "node", node,
            *merge({"spec": {"unschedulable": True}, "metadata": {"annotations": mine}}),
        )  # fmt: skip
    finally:
        scene.cluster.kubectl(
            "patch", "node", node,
            *merge({"spec": {"unschedulable": None}, "metadata": {"annotations": dict.fromkeys(mine)}}),
        )  # fmt: skip
    for change in (
        {"metadata": {"labels": {"x": "y"}}},
        {
            "metadata": {
                "annotations": {"cluster-autoscaler.kubernetes.io/scale-down-disabled": "x"}
            }
        },
        {"spec": {"taints": [{"key": "other", "effect": "NoExecute"}]}},
        {"spec": {"providerID": "x"}},
    ):
        said = await asyncio.to_thread(nodes.is_denied, "patch", "node", node, *merge(change))
        scene.teller.say("denied", said[-100:])
    for forbidden in (("get", "pods", "-A"), ("delete", "node", node), ("get", "secrets", "-A")):
        await asyncio.to_thread(nodes.is_denied, *forbidden)


async def test_who_may_not_create_pods_may_not_have_a_job_create_them(
    scene: Scene, node: str
) -> None:
    kubectl = scene.cluster.kubectl
    inside = ("-n", scene.namespace)
    kubectl(*inside, "create", "serviceaccount", "stranger")
    try:
        kubectl(
            *inside, "create", "role", "stranger", "--verb=create,get,update,patch",
            f"--resource={names.PLURAL}.{names.GROUP}",
        )  # fmt: skip
        kubectl(
            *inside, "create", "rolebinding", "stranger", "--role=stranger",
            f"--serviceaccount={scene.namespace}:stranger",
        )  # fmt: skip
        stranger = As(scene, "stranger", scene.namespace)
        text = json.dumps(scene.build_job("smuggled"))
        said = await asyncio.to_thread(stranger.is_denied, *inside, "create", "-f", "-", stdin=text)
        assert "pods" in said, said
        scene.teller.say("denied", said[-120:])
    finally:
        for kind in ("rolebinding", "role", "serviceaccount"):
            kubectl(*inside, "delete", kind, "stranger", "--ignore-not-found")

"""Runs every command of the platform team's documents as written: install, arm, break a GPU, upgrade, uninstall."""

import asyncio
import json

import pytest

from everstep_contract import names
from everstep_stories.clusters import Cluster, NotHereError
from everstep_stories.documents import (
    BY_HAND,
    CHART,
    EXAMPLES,
    README,
    TROUBLESHOOTING,
    read_all,
)
from everstep_stories.figures import Recorder
from everstep_stories.reader import Reader
from everstep_stories.system import NAMESPACE, RELEASE, System

pytestmark = pytest.mark.timeout(1200)

OWN_KEY = (
    "kubectl create secret generic everstep-key -n everstep-system "
    '--from-literal=key="$(openssl rand -hex 32)"',
    "helm install everstep charts/everstep -n everstep-system --set key.existingSecret=everstep-key",
)
"""The other way to install, with a key of your own. It runs at the end and is then uninstalled."""


async def test_every_command_of_the_documents_works_as_documented(
    cluster: Cluster, bare_system: System, recorder: Recorder
) -> None:
    if not bare_system.by_helm:
        raise NotHereError("the local lab runs the operator without Helm")
    if not hasattr(cluster, "pods_store_environment"):
        raise NotHereError("the example's image and bucket are the kind lab's")
    await asyncio.to_thread(_make_bare, cluster, bare_system)
    reader = Reader(cluster, recorder, _blanks(cluster))

    await reader.follow(README, "On your own cluster")
    await reader.follow(CHART, "Install", later=OWN_KEY)
    await reader.follow(CHART, "Arm")
    node, quarantine = await _break_a_gpu(cluster, recorder)
    reader.blanks["NAME-0-1"] = _find_pod(cluster, slot=0)["metadata"]["name"]
    await reader.follow(TROUBLESHOOTING, "")
    cluster.heal(node)
    reader.blanks["nodequarantine NAME"] = f"nodequarantine {quarantine}"
    await reader.follow(TROUBLESHOOTING, "Nodes")
    await _until(lambda: not _get(cluster, "node", node)["spec"].get("unschedulable"))
    await reader.follow(CHART, "Upgrade")
    await reader.follow(EXAMPLES, "The manifest")

    status = _get(cluster, "rtj", "byte-lm", "-n", "default")["status"]
    recorder.outcome.steps_lost = sum(i.get("stepsLost", 0) for i in status.get("incidents", []))
    assert status["step"] == 200
    assert recorder.outcome.steps_lost == 0

    await reader.follow(CHART, "Uninstall")
    for command in OWN_KEY:
        await reader.type(command)
    await reader.type(f"helm uninstall {RELEASE} -n {NAMESPACE}")
    left = {c for c in read_all() if c not in BY_HAND} - set(reader.typed)
    assert not left, f"commands that were not run: {left}"


def _blanks(cluster: Cluster) -> dict[str, str]:
    store = dict(getattr(cluster, "pods_store_environment"))  # noqa: B009
    more = " ".join(
        f"--from-literal={k}={store.pop(k)}" for k in ("AWS_ENDPOINT_URL", "AWS_ALLOW_HTTP")
    )
    values = {f"{name}=…": f"{name}={value}" for name, value in store.items()}
    values["AWS_REGION=…"] += f" {more}"
    return {
        **values,
        "<your selector>": "app.kubernetes.io/name=dcgm-exporter",
        "-f job.yaml": "-f examples/byte-lm/job.yaml",
        "NAME": "byte-lm",
    }


def _make_bare(cluster: Cluster, system: System) -> None:
    """Create the state before the first document: no release, no job, no Secret."""
    system.helm("uninstall", RELEASE, "-n", NAMESPACE, "--ignore-not-found", "--wait")
    for what in (
        ("secret", "object-store", "-n", "default"),
        ("secret", "everstep-operator-key", "everstep-key", "-n", NAMESPACE),
        ("crd", "resilienttrainingjobs.everstep.dev", "nodequarantines.everstep.dev"),
    ):
        cluster.kubectl("delete", *what, "--ignore-not-found", timeout=120)


async def _break_a_gpu(cluster: Cluster, recorder: Recorder) -> tuple[str, str]:
    """Break the GPU of slot 1; returns the node and its quarantine."""
    pod = _find_pod(cluster, slot=1)
    node = pod["spec"]["nodeName"]
    recorder.say("fault", f"{node}, GPU 0: XID 79")
    cluster.fault(node, gpu=0, xid=79)
    found: list[dict] = []

    def there() -> bool:
        found[:] = _get(cluster, "nodequarantines")["items"]
        return bool(found)

    await _until(there)
    return node, found[0]["metadata"]["name"]


def _find_pod(cluster: Cluster, slot: int) -> dict:
    """The slot's newest pod: a pod that its node rejected was replaced."""
    labels = f"{names.LABEL_JOB}=byte-lm,{names.LABEL_SLOT}={slot}"
    found = _get(cluster, "pods", "-n", "default", "-l", labels)["items"]
    newest: dict = max(found, key=lambda pod: pod["metadata"]["creationTimestamp"])
    return newest


async def _until(condition: object, limit: float = 90.0) -> None:
    assert callable(condition)
    async with asyncio.timeout(limit):
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(0.5)


def _get(cluster: Cluster, *what: str) -> dict:
    found: dict = json.loads(cluster.kubectl("get", *what, "-o", "json"))
    return found

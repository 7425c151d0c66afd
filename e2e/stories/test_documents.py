"""The documents of a platform team, typed word for word: install, arm, break a GPU, upgrade, uninstall."""

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
from everstep_stories.hands import Hands
from everstep_stories.system import NAMESPACE, RELEASE, System
from everstep_stories.telling import Teller

pytestmark = pytest.mark.timeout(1200)

OWN_KEY = (
    "kubectl create secret generic everstep-key -n everstep-system "
    '--from-literal=key="$(openssl rand -hex 32)"',
    "helm install everstep charts/everstep -n everstep-system --set key.existingSecret=everstep-key",
)
"""The other way to install: gone once more at the end."""


async def test_every_command_of_the_documents_does_what_they_say(
    cluster: Cluster, bare_system: System, teller: Teller
) -> None:
    if not bare_system.by_helm:
        raise NotHereError("the local lab runs the operator without Helm")
    if not hasattr(cluster, "pods_store_environment"):
        raise NotHereError("the example's image and bucket are the kind lab's")
    await asyncio.to_thread(_make_bare, cluster, bare_system)
    hands = Hands(cluster, teller, _blanks(cluster))

    await hands.follow(README, "On your own cluster")
    await hands.follow(CHART, "Install", later=OWN_KEY)
    await hands.follow(CHART, "Arm")
    node, quarantine = await _break_a_gpu(cluster, teller)
    hands.blanks["NAME-0-1"] = _find_pod(cluster, slot=0)["metadata"]["name"]
    await hands.follow(TROUBLESHOOTING, "")
    cluster.heal(node)
    hands.blanks["nodequarantine NAME"] = f"nodequarantine {quarantine}"
    await hands.follow(TROUBLESHOOTING, "Nodes")
    await _until(lambda: not _get(cluster, "node", node)["spec"].get("unschedulable"))
    await hands.follow(CHART, "Upgrade")
    await hands.follow(EXAMPLES, "The manifest")

    status = _get(cluster, "rtj", "byte-lm", "-n", "default")["status"]
    teller.outcome.steps_lost = sum(i.get("stepsLost", 0) for i in status.get("incidents", []))
    assert status["step"] == 200
    assert teller.outcome.steps_lost == 0

    await hands.follow(CHART, "Uninstall")
    for command in OWN_KEY:
        await hands.type(command)
    await hands.type(f"helm uninstall {RELEASE} -n {NAMESPACE}")
    left = {c for c in read_all() if c not in BY_HAND} - set(hands.typed)
    assert not left, f"nobody has typed {left}"


def _blanks(cluster: Cluster) -> dict[str, str]:
    store = dict(getattr(cluster, "pods_store_environment"))  # noqa: B009
    more = " ".join(
        f"--from-literal={k}={store.pop(k)}" for k in ("AWS_ENDPOINT_URL", "AWS_ALLOW_HTTP")
    )
    values = {f"{name}=…": f"{name}={value}" for name, value in store.items()}
    values["AWS_REGION=…"] += f" {more}"
    return {
        **values,
        "<that selector>": "app.kubernetes.io/name=dcgm-exporter",
        "-f job.yaml": "-f examples/byte-lm/job.yaml",
        "NAME": "byte-lm",
    }


def _make_bare(cluster: Cluster, system: System) -> None:
    """As it is before the first page: no release, no job, no Secret."""
    system.helm("uninstall", RELEASE, "-n", NAMESPACE, "--ignore-not-found", "--wait")
    for what in (
        ("secret", "object-store", "-n", "default"),
        ("secret", "everstep-operator-key", "everstep-key", "-n", NAMESPACE),
        ("crd", "resilienttrainingjobs.everstep.dev", "nodequarantines.everstep.dev"),
    ):
        cluster.kubectl("delete", *what, "--ignore-not-found", timeout=120)


async def _break_a_gpu(cluster: Cluster, teller: Teller) -> tuple[str, str]:
    """Under slot 1; the node and its quarantine."""
    pod = _find_pod(cluster, slot=1)
    node = pod["spec"]["nodeName"]
    teller.say("fault", f"{node}, GPU 0: XID 79")
    cluster.fault(node, gpu=0, xid=79)
    found: list[dict] = []

    def there() -> bool:
        found[:] = _get(cluster, "nodequarantines")["items"]
        return bool(found)

    await _until(there)
    return node, found[0]["metadata"]["name"]


def _find_pod(cluster: Cluster, slot: int) -> dict:
    """The slot's newest: one that its node refused has had a successor."""
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

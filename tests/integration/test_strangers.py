"""Strangers achieve nothing with their own rights on the real API server.

A tenant may do what the ClusterRole `edit` allows in its own namespace. A neighbor may do the same
in the job's namespace. Somebody who has stolen the operator's token may do what RBAC and the
policies allow.
"""

import asyncio
import copy
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from everstep_contract import names, report
from everstep_contract.report import Cause, ExitReport
from everstep_demo.board import Board, Object, is_true
from everstep_demo.runwatch import RunWatch
from everstep_demo.trial import NAMESPACE, URI, Trial
from everstep_lab import Lab, chart, kubeconfig
from everstep_lab.api import Api, ApiError
from stub_image.given import build_stub_job

pytestmark = [pytest.mark.lab, pytest.mark.timeout(240)]

CORE = "/api/v1/namespaces"
PYTHON = "plain/python:test"
ACCOUNTS = """
apiVersion: v1
kind: Namespace
metadata: {name: tenant}
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: stranger, namespace: tenant}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: stranger, namespace: tenant}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: edit}
subjects: [{kind: ServiceAccount, name: stranger, namespace: tenant}]
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: neighbour, namespace: default}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: neighbour, namespace: default}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: edit}
subjects: [{kind: ServiceAccount, name: neighbour, namespace: default}]
"""
EXIT = "import os; open(os.environ['LOG'], 'w').write(os.environ['REPORT'])"
SERVE = """
import http.server, os
class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        print("asked for", self.path, flush=True)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(os.environ["PAGE"].encode())
    def log_message(self, *args): pass
server = http.server.HTTPServer((os.environ["POD_IP"], 9400), Page)
print("listening", flush=True)
server.serve_forever()
"""


class Scene:
    """The administrator's view, and clients with the rights of others."""

    def __init__(self, lab: Lab, admin: Api, stack: AsyncExitStack) -> None:
        self.lab, self.admin, self._stack = lab, admin, stack
        self.board = Board(admin)

    async def acting(self, namespace: str, account: str) -> Api:
        """Return a client with a fresh token of that ServiceAccount."""
        path = f"{CORE}/{namespace}/serviceaccounts/{account}/token"
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        token = (await self.admin.create(path, body))["status"]["token"]
        url, _ = kubeconfig.read(self.lab.kubeconfig)
        ca = self.lab.places.certs / "ca.crt"
        return await self._stack.enter_async_context(Api(url, token=token, ca=ca))

    async def create_pod(self, api: Api, body: Object) -> str:
        """Create the pod, which is deleted at the end; return its path."""
        path = f"{CORE}/{body['metadata']['namespace']}/pods"
        await until(f"{path} takes a pod", lambda: _created(api, path, body))
        mine = f"{path}/{body['metadata']['name']}"
        self._stack.push_async_callback(self.admin.delete, mine, grace=0)
        return mine

    async def until_ended(self, path: str) -> None:
        """Wait until the pod's container has ended, or the pod has been garbage-collected."""

        async def ended() -> bool:
            pod = await self.find(path)
            statuses = (pod or {}).get("status", {}).get("containerStatuses", [])
            return pod is None or any("terminated" in s["state"] for s in statuses)

        await until(f"{path} to end", ended)

    async def find(self, path: str) -> Object | None:
        try:
            return await self.admin.get(path)
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def events(self, reason: str) -> list[Object]:
        found = await self.admin.list(f"{CORE}/default/events")
        return [event for event in found if event["reason"] == reason]

    async def quarantined(self) -> set[str]:
        return {q["spec"]["nodeName"] for q in await self.board.quarantines()}


async def _created(api: Api, path: str, body: Object) -> bool:
    """Create the pod; False until its namespace has a ServiceAccount and the right is in effect."""
    try:
        await api.create(path, body)
    except ApiError as error:
        if error.status == 403 and "everstep" not in error.message:
            return False
        raise
    return True


async def until(what: str, is_so: Any, limit: float = 60.0) -> None:
    try:
        async with asyncio.timeout(limit):
            while not await is_so():
                await asyncio.sleep(0.2)
    except TimeoutError:
        raise AssertionError(f"waited {limit:.0f} s for: {what}") from None


@pytest.fixture
async def scene(lab: Lab, board: Board) -> AsyncIterator[Scene]:
    await asyncio.to_thread(lab.kubectl, "apply", "-f", "-", stdin=ACCOUNTS)
    async with AsyncExitStack() as stack:
        admin = await stack.enter_async_context(lab.api())
        yield Scene(lab, admin, stack)


@pytest.fixture
async def victim(scene: Scene) -> AsyncIterator[Trial]:
    """A job that trains on two of the five nodes."""
    name = "victim"
    await scene.board.create(build_stub_job(name))
    watch = RunWatch(URI, f"{NAMESPACE}/{name}", scene.lab.store_environment)
    trial = Trial(name, scene.board, watch)
    await trial.until_stepping()
    yield trial
    await scene.board.delete(name)

    async def gone() -> bool:
        return not await scene.board.pods(name)

    await until("the victim's pods to go", gone)


async def lives(trial: Trial) -> list[tuple[int, str]]:
    """Return the attempt and the pod UID of each slot from the job's status."""
    slots = (await trial.job())["status"]["slots"]
    return [(slot["attempt"], slot["podUid"]) for slot in slots]


async def until_further(trial: Trial) -> None:
    step = await trial.step()

    async def further() -> bool:
        return await trial.step() > step + 20

    await trial.until(f"a step after {step + 20}", further)


def a_pod(namespace: str, name: str, script: str, **env: str) -> Object:
    variables: list[Object] = [{"name": key, "value": value} for key, value in env.items()]
    address = {"fieldRef": {"fieldPath": "status.podIP"}}
    container = {
        "name": names.TRAINER_CONTAINER,
        "image": PYTHON,
        "command": ["python", "-c", script],
        "env": [{"name": "POD_IP", "valueFrom": address}, *variables],
        "ports": [{"name": "metrics", "containerPort": 9400}],
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"containers": [container], "restartPolicy": "Never"},
    }


def a_forgery(pod: Object, namespace: str, attempt: int) -> Object:
    """A pod with everything that can be copied from the job's pod: labels, owner, annotations, proof.

    It reports that the job is done.
    """
    said = ExitReport(cause=Cause.DONE, message="", attempt=attempt, epoch=1, step=1, done=True)
    log, text = names.TERMINATION_LOG, report.encode(said).decode()
    body = a_pod(namespace, f"victim-0-{attempt}", EXIT, LOG=log, REPORT=text)
    copied = copy.deepcopy(pod["metadata"])
    for key in ("labels", "annotations", "ownerReferences"):
        body["metadata"][key] = copied[key]
    body["metadata"]["labels"][names.LABEL_ATTEMPT] = str(attempt)
    return body


async def test_forged_pods_in_another_namespace_end_no_job(scene: Scene, victim: Trial) -> None:
    stranger = await scene.acting("tenant", "stranger")
    before = await lives(victim)
    genuine = await scene.admin.get(f"{CORE}/{NAMESPACE}/pods/victim-0-1")
    for attempt in (1, 999):
        forged = await scene.create_pod(stranger, a_forgery(genuine, "tenant", attempt))
        await scene.until_ended(forged)
    await until_further(victim)
    assert not is_true(await victim.job(), "Complete")
    assert await lives(victim) == before


async def test_a_forged_attempt_beside_the_job_is_not_adopted_not_even_after_a_lost_status(
    scene: Scene, victim: Trial
) -> None:
    neighbour = await scene.acting(NAMESPACE, "neighbour")
    before = await lives(victim)
    genuine = await scene.admin.get(f"{CORE}/{NAMESPACE}/pods/victim-0-1")
    forged = await scene.create_pod(neighbour, a_forgery(genuine, NAMESPACE, 999))
    await scene.until_ended(forged)
    await until_further(victim)
    assert await lives(victim) == before

    path = f"/apis/{names.GROUP}/{names.VERSION}/namespaces/{NAMESPACE}/{names.PLURAL}/victim"
    fields = (await victim.job())["status"].keys()
    await scene.admin.patch(f"{path}/status", {"status": dict.fromkeys(fields)})

    async def rebuilt() -> bool:
        return "slots" in (await victim.job()).get("status", {})

    await victim.until("status to be rebuilt", rebuilt)
    await until_further(victim)
    assert await lives(victim) == before, "the operator must read attempts from genuine pods only"
    assert not is_true(await victim.job(), "Complete")
    assert await scene.find(forged) is not None, (
        "the operator must not delete a pod that is not the job's"
    )


def a_page(node: Object, xid: int) -> str:
    """The page of a dcgm-exporter with this node's GPUs. The first GPU has this XID."""
    lines = []
    for gpu in node["gpus"]:
        labels = f'gpu="{gpu["index"]}",UUID="{gpu["uuid"]}",Hostname="x"'
        lines.append(f"DCGM_FI_DEV_XID_ERRORS{{{labels}}} {xid if gpu['index'] == 0 else 0}")
    return "\n".join(lines) + "\n"


def an_exporter(node: str, shown: Object, xid: int) -> Object:
    """A tenant's pod with the labels of an exporter and the name of the node that it runs on."""
    body = a_pod("tenant", f"exporter-{node}", SERVE, PAGE=a_page(shown, xid))
    body["metadata"]["labels"] = {
        "app.kubernetes.io/name": "dcgm-exporter", "app": "nvidia-dcgm-exporter",
    }  # fmt: skip
    body["spec"]["nodeName"] = node
    return body


async def listens(scene: Scene, path: str) -> bool:
    try:
        return "listening" in await scene.admin.text(f"{path}/log")
    except ApiError:
        return False


async def test_a_tenants_exporter_convicts_no_node_and_hides_no_fault(scene: Scene) -> None:
    """The exporter accuses one node, and shows another node as healthy whose GPU really fails.

    The verdict on the second node proves that the operator has looked at both.
    """
    stranger = await scene.acting("tenant", "stranger")
    shown = (await asyncio.to_thread(scene.lab.status))["nodes"]
    accused, failing = sorted(shown)[:2]
    forged = [
        await scene.create_pod(stranger, an_exporter(accused, shown[accused], 79)),
        await scene.create_pod(stranger, an_exporter(failing, shown[failing], 0)),
    ]
    for path in forged:
        await until(f"{path} to listen", lambda path=path: listens(scene, path))  # type: ignore[misc]
    await list_exporters(scene)
    scene.lab.fault(failing, gpu=0, xid=64)
    try:

        async def convicted() -> bool:
            return failing in await scene.quarantined()

        await until("the verdict on the failing node", convicted)
        assert await scene.quarantined() == {failing}
        assert not (await scene.board.nodes())[accused].cordoned
        for path in forged:
            assert "asked" not in await scene.admin.text(f"{path}/log")
    finally:
        await release(scene, failing)


async def list_exporters(scene: Scene) -> None:
    """Restart the operator. It lists the exporters at its start, and then only once a minute."""
    await asyncio.to_thread(scene.lab.operator_restart)


async def release(scene: Scene, node: str) -> None:
    """Heal the node, delete the quarantines (which answers the evidence), and wait for the release."""
    await asyncio.to_thread(scene.lab.heal, node)
    for quarantine in await scene.board.quarantines():
        await scene.board.release(quarantine["metadata"]["name"])

    async def free() -> bool:
        return not (await scene.board.nodes())[node].cordoned

    await until(f"{node} to be free", free)


async def test_a_second_exporter_makes_its_node_unknown_with_an_event_and_nothing_else(
    scene: Scene,
) -> None:
    """Somebody who may create DaemonSets in a trusted namespace has created the exporter."""
    shown = (await asyncio.to_thread(scene.lab.status))["nodes"]
    node = sorted(shown)[-1]
    labels = {"app": "nvidia-dcgm-exporter", "second": "yes"}
    pod = a_pod("kube-system", "", SERVE, PAGE=a_page(shown[node], 79))["spec"]
    pod = {**pod, "restartPolicy": "Always", "nodeSelector": {"kubernetes.io/hostname": node}}
    path = "/apis/apps/v1/namespaces/kube-system/daemonsets"
    spec = {
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": pod},
    }
    metadata = {"name": "second", "labels": labels}
    await scene.admin.create(
        path, {"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": metadata, "spec": spec}
    )
    try:

        async def ready() -> bool:
            found = (await scene.admin.get(f"{path}/second")).get("status", {})
            return bool(found.get("numberReady"))

        async def told() -> list[Object]:
            return await scene.events("ExporterContested")

        await until("the second exporter to be Ready", ready)
        await list_exporters(scene)
        await until("an Event", told)
        (event, *_) = await told()
        assert event["involvedObject"]["name"] == node
        assert "2 exporters run on the node" in event["message"]
        assert await scene.quarantined() == set()
        assert not (await scene.board.nodes())[node].cordoned
    finally:
        await scene.admin.delete(f"{path}/second")


STOLEN: dict[str, tuple[str, str]] = {
    "kube-system": ("pods", "runs no job in the namespace kube-system"),
    chart.NAMESPACE: ("pods", f"runs no job in the namespace {chart.NAMESPACE}"),
    "tenant": ("pods", "only what a ResilientTrainingJob controls"),
    "default": ("secrets", "only what a ResilientTrainingJob controls"),
}


@pytest.mark.parametrize("namespace", STOLEN)
async def test_who_has_the_operators_token_makes_no_pod_or_secret_of_its_own(
    scene: Scene, namespace: str
) -> None:
    thief = await scene.acting(chart.NAMESPACE, "everstep-operator")
    kind, words = STOLEN[namespace]
    body = a_pod(namespace, "mine", EXIT)
    if kind == "secrets":
        annotations = {"kubernetes.io/service-account.name": "default"}
        metadata = {"name": "mine", "annotations": annotations}
        body = {
            "apiVersion": "v1", "kind": "Secret", "metadata": metadata,
            "type": "kubernetes.io/service-account-token",
        }  # fmt: skip
    with pytest.raises(ApiError, match=words):
        await thief.create(f"{CORE}/{namespace}/{kind}", body)


async def test_who_has_the_operators_token_deletes_no_other_pods(scene: Scene) -> None:
    thief = await scene.acting(chart.NAMESPACE, "everstep-operator")
    stranger = await scene.acting("tenant", "stranger")
    theirs = await scene.create_pod(stranger, a_pod("tenant", "theirs", "print()"))
    with pytest.raises(ApiError, match="only what a ResilientTrainingJob controls"):
        await thief.delete(theirs)
    assert await scene.find(theirs) is not None

"""Actions that the policies forbid to the operator and to authors of jobs, tried with their own tokens."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from chart_given import As, apply, find, read_documents
from everstep_lab import Lab, chart
from everstep_lab.api import Api, ApiError, Object
from job_builders import a_spec

pytestmark = pytest.mark.lab

NODE = "/api/v1/nodes/node-1"
JOBS = "/apis/everstep.dev/v1alpha1/namespaces/team/resilienttrainingjobs"
OUR_TAINT = {"key": "everstep.dev/quarantine", "value": "i-1", "effect": "NoSchedule"}
THEIR_TAINT = {"key": "team/reserved", "value": "yes", "effect": "NoSchedule"}
MARK = {"everstep.dev/cordoned-by": "{}"}


@pytest.fixture
async def nodes(acting: As, admin: Api) -> Api:
    """A client as everstep-nodes. The node has a taint and an annotation of others."""
    await admin.patch(
        NODE,
        {
            "metadata": {"annotations": {"team/note": "x", "everstep.dev/cordoned-by": None}},
            "spec": {"unschedulable": None, "taints": [THEIR_TAINT]},
        },
    )
    api = await acting(chart.NAMESPACE, "everstep-nodes")
    await until_in_force(api, {"metadata": {"labels": {"a": "b"}}})
    return api


async def until_in_force(api: Api, refused: Object) -> None:
    """Wait until the policy is in force, a moment after its creation."""
    for _ in range(150):
        if await refusal(api, refused):
            return
        await asyncio.sleep(0.2)
    raise AssertionError("the policy is not in force after 30 s")


async def refusal(api: Api, body: Any, path: str = NODE) -> str:
    """Return why the API server refuses the patch, in a dry run; empty if it accepts the patch."""
    try:
        await api.patch(path, body, dryRun="All")
    except ApiError as error:
        return str(error)
    return ""


def tainted(*taints: Object) -> Object:
    return {"spec": {"taints": list(taints)}}


async def test_a_node_is_marked_and_released_with_the_rights_of_the_chart(
    nodes: Api, admin: Api
) -> None:
    marked = {
        "metadata": {"annotations": MARK},
        "spec": {"unschedulable": True, "taints": [THEIR_TAINT, OUR_TAINT]},
    }
    await nodes.patch(NODE, marked)
    assert (await admin.get(NODE))["spec"]["unschedulable"] is True
    await until_released(nodes, admin)
    found = await admin.get(NODE)
    assert "unschedulable" not in found["spec"]
    assert "everstep.dev/cordoned-by" not in found["metadata"]["annotations"]


async def until_released(nodes: Api, admin: Api) -> None:
    """Release the node as the operator does: for the version that it has read, and with the taints of
    others kept, including the one that the controller manager adds for a cordon.
    """
    for _ in range(20):
        node = await admin.get(NODE)
        kept = [t for t in node["spec"].get("taints", ()) if t["key"] != OUR_TAINT["key"]]
        version = node["metadata"]["resourceVersion"]
        released = {
            "metadata": {
                "resourceVersion": version,
                "annotations": {"everstep.dev/cordoned-by": None},
            },
            "spec": {"unschedulable": None, "taints": kept},
        }
        try:
            await nodes.patch(NODE, released)
            return
        except ApiError as error:
            if error.status != 409:
                raise
    raise AssertionError("the node changes all the time")


REFUSED = [
    ({"metadata": {"labels": {"team": "ours"}}}, "metadata.labels"),
    ({"metadata": {"labels": {"kubernetes.io/hostname": None}}}, "metadata.labels"),
    ({"metadata": {"annotations": {"team/note": "y"}}}, "team/note"),
    ({"metadata": {"annotations": {"team/note": None}}}, "team/note"),
    ({"metadata": {"annotations": {"everstep.dev.evil/x": "y"}}}, "everstep.dev.evil/x"),
    ({"metadata": {"finalizers": ["a.b/c"]}}, "metadata.finalizers"),
    ({"spec": {"podCIDR": "10.0.0.0/24"}}, "spec.podCIDR"),
    (tainted(), "other taints"),
    (tainted(THEIR_TAINT, {**THEIR_TAINT, "key": "more"}), "other taints"),
    (tainted({**THEIR_TAINT, "value": "no"}, OUR_TAINT), "other taints"),
]


@pytest.mark.parametrize(("body", "named"), REFUSED, ids=[str(body) for body, _ in REFUSED])
async def test_nothing_else_of_a_node_may_be_changed(nodes: Api, body: Object, named: str) -> None:
    text = await refusal(nodes, body)
    assert "Everstep may not change" in text
    assert named in text


async def test_others_are_not_held_to_it(nodes: Api, admin: Api) -> None:
    for body, _ in REFUSED[:3]:
        assert await refusal(admin, body) == ""


async def test_uninstalls_own_account_is_held_to_it(
    nodes: Api, acting: As, helm: Path, installed: Lab
) -> None:
    documents = read_documents(chart.render(helm))
    for kind in ("ServiceAccount", "ClusterRole", "ClusterRoleBinding"):
        await _apply(installed, find(documents, kind, "everstep-release"))
    api = await acting(chart.NAMESPACE, "everstep-release")
    assert "Everstep may not change" in await refusal(api, REFUSED[0][0])
    assert await refusal(api, {"spec": {"unschedulable": True}}) == ""


async def _apply(lab: Lab, document: Object) -> None:
    await asyncio.to_thread(apply, lab, json.dumps(document))


async def test_a_node_full_of_marks_of_others_is_not_too_much_for_the_policy(
    nodes: Api, admin: Api
) -> None:
    """200 KB of annotations, 100 labels and 50 taints reach the limits of a policy's cost."""
    many = {f"team/note-{n}": "x" * 1000 for n in range(200)}
    labels = {f"team/label-{n}": "x" for n in range(100)}
    taints = [{**THEIR_TAINT, "key": f"team/taint-{n}"} for n in range(50)]
    await admin.patch(
        NODE, {"metadata": {"annotations": many, "labels": labels}, "spec": {"taints": taints}}
    )
    try:
        marked = {"metadata": {"annotations": MARK}, **tainted(*taints, OUR_TAINT)}
        assert await refusal(nodes, marked) == ""
        assert "other taints" in await refusal(nodes, tainted(*taints[1:], OUR_TAINT))
    finally:
        empty: Object = {"annotations": dict.fromkeys(many), "labels": dict.fromkeys(labels)}
        await admin.patch(NODE, {"metadata": empty, **tainted()})


async def test_in_observe_only_mode_marks_can_be_removed_and_not_set(
    nodes: Api, admin: Api, helm: Path, installed: Lab
) -> None:
    marked = {"metadata": {"annotations": MARK}, "spec": {"unschedulable": True}}
    only = ["policy-nodes.yaml"]
    shown = chart.render(helm, only=only, values=["observeOnly=true"])
    await asyncio.to_thread(apply, installed, shown)
    try:
        await until_in_force(nodes, marked)
        assert "observe-only mode" in await refusal(nodes, {"spec": {"unschedulable": True}})
        assert "observe-only mode" in await refusal(nodes, tainted(THEIR_TAINT, OUR_TAINT))
        await admin.patch(NODE, {"spec": {"unschedulable": True, "taints": [OUR_TAINT]}})
        await until_released(nodes, admin)
    finally:
        await asyncio.to_thread(
            apply, installed, chart.render(helm, only=only, values=["observeOnly=false"])
        )
        await admin.patch(NODE, {"spec": {"unschedulable": None, "taints": None}})


DENIED = [
    ("everstep-operator", "GET", "/api/v1/namespaces/everstep-system/secrets"),
    ("everstep-operator", "GET", "/api/v1/namespaces/everstep-system/configmaps"),
    ("everstep-operator", "PATCH", NODE),
    ("everstep-operator", "POST", f"{NODE}/status"),
    ("everstep-operator", "POST", "/api/v1/namespaces/everstep-system/serviceaccounts/default/token"),
    ("everstep-operator", "POST", "/api/v1/namespaces/kube-system/serviceaccounts/default/token"),
    ("everstep-operator", "POST", "/api/v1/namespaces/team/pods/x/exec"),
    ("everstep-operator", "GET", "/apis/coordination.k8s.io/v1/namespaces/everstep-system/leases/x"),
    ("everstep-operator", "POST", "/apis/everstep.dev/v1alpha1/nodequarantines"),
    ("everstep-nodes", "GET", "/api/v1/nodes"),
    ("everstep-nodes", "GET", "/api/v1/pods"),
    ("everstep-nodes", "POST", "/api/v1/namespaces/team/secrets"),
    ("everstep-nodes", "PATCH", f"{NODE}/status"),
    ("everstep-nodes", "POST", "/api/v1/nodes"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("account", "verb", "path"), DENIED, ids=[f"{who} {verb} {path}" for who, verb, path in DENIED]
)
async def test_a_right_that_was_not_given_is_denied(
    acting: As, account: str, verb: str, path: str
) -> None:
    api = await acting(chart.NAMESPACE, account)
    calls: dict[str, Callable[[], Awaitable[Any]]] = {
        "GET": lambda: api.get(path),
        "PATCH": lambda: api.patch(path, {"metadata": {"labels": {"a": "b"}}}, dryRun="All"),
        "POST": lambda: api.create(path, {}),
    }
    with pytest.raises(ApiError, match="cannot") as denied:
        await calls[verb]()
    assert denied.value.status == 403


async def test_the_operator_may_ask_for_the_other_accounts_token(acting: As) -> None:
    api = await acting(chart.NAMESPACE, "everstep-operator")
    path = f"/api/v1/namespaces/{chart.NAMESPACE}/serviceaccounts/everstep-nodes/token"
    body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    assert (await api.create(path, body))["status"]["token"]


AUTHORS = """
apiVersion: v1
kind: Namespace
metadata: {name: team}
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: without-pods, namespace: team}
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: with-pods, namespace: team}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: writers, namespace: team}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: everstep-edit}
subjects:
  - {kind: ServiceAccount, name: without-pods, namespace: team}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: editors, namespace: team}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: edit}
subjects:
  - {kind: ServiceAccount, name: with-pods, namespace: team}
"""


def a_job(name: str) -> Object:
    return {
        "apiVersion": "everstep.dev/v1alpha1", "kind": "ResilientTrainingJob",
        "metadata": {"name": name}, "spec": {**a_spec(), "suspend": True},
    }  # fmt: skip


@pytest.fixture
async def authors(installed: Lab, acting: As, admin: Api) -> tuple[Api, Api]:
    """One client may write jobs but not create pods. The other may do both through `edit`."""
    await asyncio.to_thread(apply, installed, AUTHORS)
    without, with_pods = await acting("team", "without-pods"), await acting("team", "with-pods")
    for _ in range(150):
        try:
            await with_pods.create(f"{JOBS}?dryRun=All", a_job("trial"))
            await without.create(f"{JOBS}?dryRun=All", a_job("trial"))
        except ApiError as error:
            if "may not create pods" in str(error):
                break
        await asyncio.sleep(0.2)
    return without, with_pods


async def test_an_author_without_the_right_to_create_pods_may_not_write_a_job(
    authors: tuple[Api, Api], admin: Api
) -> None:
    without, with_pods = authors
    with pytest.raises(ApiError, match="may not create pods in the namespace team") as refused:
        await without.create(JOBS, a_job("theirs"))
    assert "system:serviceaccount:team:without-pods" in str(refused.value)
    await with_pods.create(JOBS, a_job("ours"))
    try:
        change = {"spec": {"workers": {"replicas": 7}}}
        assert "may not create pods" in await refusal(without, change, f"{JOBS}/ours")
        assert await refusal(with_pods, change, f"{JOBS}/ours") == ""
    finally:
        await admin.delete(f"{JOBS}/ours")


async def test_a_queue_that_suspends_and_a_collector_that_tidies_need_no_pods(
    authors: tuple[Api, Api], admin: Api
) -> None:
    without, with_pods = authors
    await with_pods.create(JOBS, a_job("queued"))
    try:
        for body in (
            {"spec": {"suspend": False}},
            {"metadata": {"finalizers": ["a.b/c"]}},
            {"metadata": {"labels": {"kueue.x-k8s.io/queue-name": "q"}}},
        ):
            assert await refusal(without, body, f"{JOBS}/queued") == ""
    finally:
        await admin.delete(f"{JOBS}/queued")


async def test_a_queue_that_writes_the_template_or_the_size_needs_pods(
    authors: tuple[Api, Api], admin: Api
) -> None:
    """operator/README.md, the contract with a queue."""
    without, with_pods = authors
    await with_pods.create(JOBS, a_job("placed"))
    placed = {"spec": {"nodeSelector": {"pool": "spot"}}}
    try:
        for workers in ({"template": placed}, {"replicas": 2}):
            body = {"spec": {"suspend": False, "workers": workers}}
            assert "may not create pods" in await refusal(without, body, f"{JOBS}/placed")
            assert await refusal(with_pods, body, f"{JOBS}/placed") == ""
    finally:
        await admin.delete(f"{JOBS}/placed")


async def test_a_job_deleted_in_the_foreground_goes(
    authors: tuple[Api, Api], installed: Lab, admin: Api
) -> None:
    """The garbage collector patches the finalizer away and has no right to create pods."""
    job = await authors[1].create(JOBS, a_job("going"))
    owner = {
        "apiVersion": job["apiVersion"], "kind": job["kind"], "name": "going",
        "uid": job["metadata"]["uid"], "blockOwnerDeletion": True,
    }  # fmt: skip
    await admin.create(
        "/api/v1/namespaces/team/configmaps",
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "its", "ownerReferences": [owner]},
        },
    )
    await asyncio.to_thread(
        installed.kubectl, "delete", "rtj", "going", "-n", "team", "--cascade=foreground",
        "--timeout=30s",
    )  # fmt: skip
    with pytest.raises(ApiError, match="not found"):
        await admin.get(f"{JOBS}/going")

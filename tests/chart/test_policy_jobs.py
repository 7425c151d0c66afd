"""Which pods and Secrets the operator may write, tried with its own token."""

import asyncio
import copy
from collections.abc import Callable
from typing import Any

import pytest

from chart_given import As, apply
from everstep_lab import Lab, chart
from everstep_lab.api import Api, ApiError, Object
from everstep_operator.jobs import manifests
from job_builders import a_job

pytestmark = pytest.mark.lab

CORE = "/api/v1/namespaces"
TEAM = "apiVersion: v1\nkind: Namespace\nmetadata: {name: team}\n"
Change = Callable[[Object], Any]


def a_pod() -> Object:
    job = a_job()
    assert job.spec is not None
    return copy.deepcopy(manifests.build_pod(job, job.spec, 0, 1))


def a_secret() -> Object:
    return manifests.build_secret(a_job(), "token")


@pytest.fixture
async def operator(installed: Lab, acting: As, admin: Api) -> Api:
    """A client with the operator's token.

    Waits for the policy to be in force, and for the namespace's ServiceAccount, which a pod needs.
    """
    await asyncio.to_thread(apply, installed, TEAM)
    api = await acting(chart.NAMESPACE, "everstep-operator")
    for _ in range(150):
        try:
            await admin.get(f"{CORE}/team/serviceaccounts/default")
            if await refusal(api, "secrets", {**a_secret(), "immutable": False}):
                return api
        except ApiError:
            pass
        await asyncio.sleep(0.2)
    raise AssertionError("the policy is not in force after 30 s")


async def refusal(api: Api, kind: str, body: Object, namespace: str = "team") -> str:
    """Return why the API server refuses the object, in a dry run; empty if it accepts it."""
    body["metadata"]["namespace"] = namespace
    try:
        await api.create(f"{CORE}/{namespace}/{kind}?dryRun=All", body)
    except ApiError as error:
        return str(error)
    return ""


async def test_what_the_operator_makes_for_a_job_is_accepted(operator: Api) -> None:
    assert await refusal(operator, "pods", a_pod()) == ""
    assert await refusal(operator, "secrets", a_secret()) == ""


def owned(**changes: Any) -> Change:
    return lambda body: body["metadata"]["ownerReferences"][0].update(changes)


def more_owners(body: Object) -> None:
    other = {"apiVersion": "v1", "kind": "ConfigMap", "name": "x", "uid": "x"}
    body["metadata"]["ownerReferences"].append(other)


PODS: dict[str, tuple[Change, str]] = {
    "of nobody": (lambda b: b["metadata"].pop("ownerReferences"), "ResilientTrainingJob controls"),
    "of another kind": (owned(kind="ConfigMap", apiVersion="v1"), "ResilientTrainingJob controls"),
    "owned and not controlled": (owned(controller=False), "ResilientTrainingJob controls"),
    "of two owners": (more_owners, "nothing else owns"),
    "of another name": (lambda b: b["metadata"].update(name="lm-0-2"), "named after"),
    "without labels": (lambda b: b["metadata"].pop("labels"), "named after"),
    "with a token": (
        lambda b: b["spec"].update(automountServiceAccountToken=True), "service account's token",
    ),
    "on a node of its choice": (lambda b: b["spec"].update(nodeName="node-1"), "scheduler"),
}  # fmt: skip


@pytest.mark.parametrize("what", PODS)
async def test_a_pod_that_is_not_a_jobs_is_refused(operator: Api, what: str) -> None:
    change, words = PODS[what]
    body = a_pod()
    change(body)
    assert words in await refusal(operator, "pods", body)


SECRETS: dict[str, tuple[Change, str]] = {
    "of nobody": (lambda b: b["metadata"].pop("ownerReferences"), "ResilientTrainingJob controls"),
    "of another name": (lambda b: b["metadata"].update(name="lm-everstep-x"), "token Secret"),
    "that changes": (lambda b: b.pop("immutable"), "token Secret"),
    "with more keys": (lambda b: b["stringData"].update(more="x"), "token Secret"),
    "without its key": (lambda b: b.pop("stringData"), "token Secret"),
    "that another account's token would be put into": (
        lambda b: (
            b.update(type="kubernetes.io/service-account-token"),
            b["metadata"].update(annotations={"kubernetes.io/service-account.name": "default"}),
        ),
        "token Secret",
    ),
}


@pytest.mark.parametrize("what", SECRETS)
async def test_a_secret_that_is_no_jobs_token_is_refused(operator: Api, what: str) -> None:
    change, words = SECRETS[what]
    body = a_secret()
    change(body)
    assert words in await refusal(operator, "secrets", body)


@pytest.mark.parametrize("namespace", ["kube-system", chart.NAMESPACE])
async def test_nothing_is_made_beside_the_clusters_own_accounts_and_the_operators_key(
    operator: Api, namespace: str
) -> None:
    assert "runs no job" in await refusal(operator, "pods", a_pod(), namespace)
    assert "runs no job" in await refusal(operator, "secrets", a_secret(), namespace)


async def test_only_pods_of_jobs_are_deleted(operator: Api, admin: Api) -> None:
    pods = f"{CORE}/team/pods"
    theirs = {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "theirs"},
        "spec": {"containers": [{"name": "c", "image": "i"}], "nodeSelector": {"no": "where"}},
    }  # fmt: skip
    await admin.create(pods, theirs)
    try:
        with pytest.raises(ApiError, match="ResilientTrainingJob controls"):
            await operator.delete(f"{pods}/theirs")
    finally:
        await admin.delete(f"{pods}/theirs", grace=0)
    await operator.create(pods, a_pod())
    await operator.delete(f"{pods}/lm-0-1", grace=0)


async def test_others_are_not_held_to_it(operator: Api, admin: Api) -> None:
    body = a_pod()
    del body["metadata"]["ownerReferences"]
    assert await refusal(admin, "pods", body) == ""

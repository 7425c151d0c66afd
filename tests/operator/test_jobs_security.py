"""What a worker pod needs where Pod Security "restricted" is enforced."""

import copy
from typing import Any

import pytest

from everstep_operator import kube
from everstep_operator.jobs import manifests
from everstep_operator.jobs.apply import is_template_fault
from job_builders import TEMPLATE, a_job, a_spec

REST = {
    "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
    "capabilities": {"drop": ["ALL"]},
    "allowPrivilegeEscalation": False,
}


def built(pod: dict[str, Any] | None = None, own: dict[str, Any] | None = None) -> dict[str, Any]:
    template = copy.deepcopy(TEMPLATE)
    if pod is not None:
        template["spec"]["securityContext"] = pod
    if own is not None:
        template["spec"]["containers"][0]["securityContext"] = own
    spec = a_spec()
    job = a_job({**spec, "workers": {**spec["workers"], "template": template}})
    assert job.spec is not None
    return manifests.build_pod(job, job.spec, 0, 1)


def context(body: dict[str, Any]) -> Any:
    return body["spec"]["containers"][0].get("securityContext")


def test_a_template_that_says_nothing_of_root_stays_as_it_is() -> None:
    assert context(built()) is None
    assert context(built(pod={"fsGroup": 1000})) is None
    assert context(built(pod={"runAsUser": 0})) is None
    assert context(built(pod={"runAsNonRoot": True}, own={"runAsUser": 0})) == {"runAsUser": 0}


def test_one_line_at_the_pod_is_enough() -> None:
    expected = {k: v for k, v in REST.items() if k != "runAsNonRoot"}
    assert context(built(pod={"runAsNonRoot": True})) == expected


def test_a_user_other_than_root_is_enough() -> None:
    assert context(built(pod={"runAsUser": 1000})) == REST
    assert context(built(own={"runAsUser": 1000})) == {"runAsUser": 1000, **REST}


def test_what_the_template_sets_is_never_changed() -> None:
    own = {
        "runAsNonRoot": True,
        "allowPrivilegeEscalation": True,
        "capabilities": {"add": ["IPC_LOCK"]},
        "seccompProfile": {"type": "Unconfined"},
    }
    assert context(built(own=own)) == own


@pytest.mark.parametrize("own", [{"privileged": True}, {"capabilities": {"add": ["SYS_ADMIN"]}}])
def test_no_contradiction_is_made_that_the_api_server_refuses(own: dict[str, Any]) -> None:
    assert "allowPrivilegeEscalation" not in context(built(pod={"runAsUser": 1000}, own=own))


def test_init_containers_and_sidecars_get_it_too() -> None:
    template = copy.deepcopy(TEMPLATE)
    template["spec"]["securityContext"] = {"runAsUser": 1000}
    template["spec"]["initContainers"] = [{"name": "fetch", "image": "x"}]
    template["spec"]["containers"].append({"name": "logs", "image": "x"})
    spec = a_spec()
    job = a_job({**spec, "workers": {**spec["workers"], "template": template}})
    assert job.spec is not None
    body = manifests.build_pod(job, job.spec, 0, 1)["spec"]
    every = [*body["initContainers"], *body["containers"]]
    assert [c["securityContext"] for c in every] == [REST] * 3


def test_autoscalers_are_told_to_stay_away_unless_the_template_says_otherwise() -> None:
    notes = built()["metadata"]["annotations"]
    assert notes == {
        "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
        "karpenter.sh/do-not-disrupt": "true",
    }
    template = copy.deepcopy(TEMPLATE)
    template["metadata"] = {"annotations": {"karpenter.sh/do-not-disrupt": "false"}}
    spec = a_spec()
    job = a_job({**spec, "workers": {**spec["workers"], "template": template}})
    assert job.spec is not None
    notes = manifests.build_pod(job, job.spec, 0, 1)["metadata"]["annotations"]
    assert notes["karpenter.sh/do-not-disrupt"] == "false"


def test_pod_security_judges_the_template_and_a_quota_does_not() -> None:
    text = 'pods "x" is forbidden: violates PodSecurity "restricted:latest": runAsNonRoot != true'
    assert is_template_fault(kube.Denied(403, "Forbidden", text))
    assert not is_template_fault(kube.Denied(403, "Forbidden", "exceeded quota: gpus"))

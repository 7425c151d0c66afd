"""The same rules, judged by a real API server: it refuses what the model refuses, with the field and the fix."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from everstep_lab.config import LabConfig
from everstep_operator import kube
from everstep_operator.kube import Kube
from job_builders import a_spec
from own_lab import own_lab

pytestmark = pytest.mark.lab
NETWORK = 89

BAD: list[tuple[dict[str, Any], str]] = [
    ({"workers": {"minReplicas": 4}}, "spec.workers.minReplicas"),
    ({"workers": {"maxReplicas": 2}}, "spec.workers.maxReplicas"),
    ({"workers": {"replicas": 0}}, "spec.workers.replicas"),
    ({"checkpoint": {"uri": "http://x/y"}}, 'uri is "http://x/y"'),
    ({"checkpoint": {"everySeconds": 5}}, "keep the one that you mean"),
    ({"checkpoint": {"run": "../other"}}, "spec.checkpoint.run"),
    ({"guard": {"action": "Explode"}}, "spec.guard.action"),
    ({"workers": {"template": {"spec": {"nodeName": "node-1"}}}}, "use nodeSelector or affinity"),
    (
        {"workers": {"template": {"spec": {"tolerations": [{"operator": "Exists"}]}}}},
        "name the keys",
    ),
]


@pytest.fixture(scope="module")
def kubeconfig() -> Iterator[str]:
    with own_lab(LabConfig(nodes=1), NETWORK) as lab:
        yield str(lab.kubeconfig)


@pytest.fixture
async def port(kubeconfig: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("KUBECONFIG", kubeconfig)
    found = await Kube.connect()
    yield found
    await found.close()


def a_document(change: dict[str, Any], name: str = "wrong") -> dict[str, Any]:
    spec = merged(a_spec(), change)
    return {
        "apiVersion": "everstep.dev/v1alpha1", "kind": "ResilientTrainingJob",
        "metadata": {"name": name, "namespace": "default"}, "spec": spec,
    }  # fmt: skip


def merged(spec: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    found = copy.deepcopy(spec)
    for key, value in change.items():
        found[key] = merged(found.get(key, {}), value) if isinstance(value, dict) else value
    return found


async def test_the_api_server_refuses_what_the_model_refuses(port: Kube) -> None:
    for change, words in BAD:
        with pytest.raises(kube.Invalid) as refused:
            await port.create(kube.JOBS, a_document(change), "default", dry_run=True)
        assert words in refused.value.message, change


async def test_a_name_that_would_not_fit_a_pods_is_refused(port: Kube) -> None:
    for name in ("a" * 51, "with.dots"):
        with pytest.raises(kube.Invalid, match=r"metadata\.name"):
            await port.create(kube.JOBS, a_document({}, name), "default", dry_run=True)


async def test_the_place_of_a_run_cannot_change(port: Kube) -> None:
    good = a_document({"suspend": True}, "stays")
    made = await port.create(kube.JOBS, good, "default")
    try:
        for change in ({"uri": "s3://other/place"}, {"run": "another"}):
            with pytest.raises(kube.Invalid, match="cannot change"):
                await port.patch(kube.JOBS, "stays", {"spec": {"checkpoint": change}}, "default")
    finally:
        await port.delete(kube.JOBS, "stays", "default", uid=made["metadata"]["uid"])
